"""Memory budgets: the peak of a training step under each strategy, and the plan that fits.

- ``budget``: keeps a wrapped model within its budget.
- ``planning``: makes a plan; ``plan``: the plan itself, and its JSON; ``planned_tensor``: a tensor
  of it; ``plan_sheet``: its table, curves and picture.
- ``estimate``: the strategies, their costs, and the table of both.
- ``mixed``: the strategies between exact tensors and codes, from ``memory_model``, the peak of each
  part of a step by the choices for its tensors, and ``ladder``, the best choices for each budget,
  which ``integer_program`` finds.
- ``trials``: chooses parts of the graph to try strategies on, and extrapolates to the whole.
- ``steps``: trains a copy of the model on a part and records its memory.
- ``miniature``: makes the inputs of a part.
"""
