"""Which calls repeat with the same inputs."""

from __future__ import annotations

import copy
import pickle

import torch
from small_net import Net
from torch import Tensor
from torch_geometric.data import Data

import gact_graph
from gact_graph.api.repeated import RepeatedInputs

X, EDGES = torch.randn(2000, 8), torch.randint(2000, (2, 6000))


def _seen(*calls: object) -> list[bool]:
    inputs = RepeatedInputs()
    return [inputs.see(call) for call in calls]


def test_one_graph() -> None:
    data = Data(x=X, edge_index=EDGES)
    assert _seen(*[((data,), {})] * 3) == [True, True, True]
    assert _seen((X, EDGES), (X, EDGES.flip(1)), (X, EDGES)) == [True, False, False]
    assert _seen((X.t(),), (X.t(),), (X,)) == [True, True, False]


def test_batches_in_the_memory_of_the_last_one_are_others() -> None:
    calls = []
    inputs = RepeatedInputs()
    for _ in range(5):
        calls.append(inputs.see((torch.randn(1000),)))
    assert calls == [True, False, False, False, False]


def test_a_changed_tensor_is_another_one() -> None:
    x = X.clone()
    inputs = RepeatedInputs()
    assert inputs.see((x,)) and inputs.see((x,))
    x.mul_(2)
    assert not inputs.see((x,))
    assert inputs.see((x,))


def test_tensors_that_require_a_gradient_follow_from_parameters() -> None:
    embedding = torch.nn.Parameter(X.clone())
    assert _seen((embedding * 1, EDGES), (embedding * 2, EDGES)) == [True, True]
    assert _seen((embedding * 1,), (embedding[:5] * 1,)) == [True, False]


def test_unknown_inputs_are_others() -> None:
    assert _seen(None, None) == [False, False]


def test_copies_keep_the_answer_alone() -> None:
    inputs = RepeatedInputs()
    inputs.see((X,))
    inputs.see((EDGES,))
    for clone in (copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs))):
        assert not clone.repeated
        assert not clone.see((EDGES,))  # nothing to compare with: as the last call was
        assert clone.see((EDGES,))


def _losses(batches: list[tuple[Tensor, Tensor]], stop: int | None) -> list[float]:
    """The losses of a training at 2 bits; with ``stop``, resumed there in another model."""

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = gact_graph.wrap(Net(), bits=2, min_bytes=0, blocks=False)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = start()
    losses = []
    for step, batch in enumerate(batches):
        if step == stop:
            states = model.state_dict(), optimizer.state_dict(), gact_graph.state_dict(model)
            model, optimizer = start()
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            gact_graph.load_state_dict(model, states[2])
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(*batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_has_the_same_noise() -> None:
    whole = [(X, EDGES)] * 8
    sampled = [(torch.randn(2000, 8), EDGES) for _ in range(8)]
    for batches in (whole, sampled):
        assert _losses(batches, 4) == _losses(batches, None)
    assert _losses(whole, None) != _losses([(X.clone(), EDGES) for _ in range(8)], None)
