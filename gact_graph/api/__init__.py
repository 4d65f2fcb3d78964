"""What a user calls, and the controller that each wrapped model has.

Here: ``wrap`` and its companions; the methods of a model that are followed, and their patches; the
controller, which joins all other rooms; and the report. Not here: anything that looks at a single
tensor.
"""
