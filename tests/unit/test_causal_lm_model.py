"""The causal language model on one rank: against a reading of its definition, in stages, tied, recomputed, dropped out."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from orchestrator.domain.ids import Rank
from orchestrator.domain.spec import JobSpec
from tests.tiny_model import a_spec, leaves_of, number, step_gradients, tokens_of, whole_model
from worker.keyed import keep_mask
from worker.parallel.group import ALONE, Group
from worker.program import Leaves
from worker.programs.causal_lm import PROGRAM


def definition(spec: JobSpec, leaves: Leaves, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) of one sequence (T,), in fp64, one position and head at a time."""
    weights = {name: leaf.detach().double() for (name, _), leaf in leaves.items()}
    heads, kv_heads, size = 8, 4, 4

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    def turned(head: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(head)
        for pair in range(size // 2):
            angle = position * 10_000.0 ** (-2 * pair / size)
            a, b = head[2 * pair], head[2 * pair + 1]
            out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    x = weights["embedding"][tokens]
    for layer in (1, 2):
        w = {name: weights[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "o", "gate", "up", "down")}
        h = norm(x, f"layers.{layer}.attention_norm")
        q, k, v = ((h @ w[n].T).view(len(tokens), -1, size) for n in ("q", "k", "v"))
        mixed = torch.zeros(len(tokens), heads, size, dtype=torch.float64)
        for at in range(len(tokens)):
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = turned(q[at, head], at)
                scores = torch.stack([query @ turned(k[past, group], past) for past in range(at + 1)])
                mixed[at, head] = (scores / math.sqrt(size)).softmax(0) @ v[: at + 1, group]
        x = x + mixed.flatten(1) @ w["o"]
        h = norm(x, f"layers.{layer}.ffn_norm")
        x = x + (F.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"]
    return norm(x, "final_norm") @ weights["head"].T


def test_logits_and_loss_are_those_of_the_definition() -> None:
    spec = a_spec()
    _, model, leaves = whole_model(spec, ALONE)
    for leaf in leaves.values():
        leaf.data.mul_(4)  # far enough from zero for attention to be uneven
    inputs, targets = tokens_of(spec, 0)
    logits = model(inputs, number(0), number(1))
    expected = torch.stack([definition(spec, leaves, sequence) for sequence in inputs])
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(logits, targets).double(), loss, rtol=1e-6, atol=0)


def test_loss_gradient_is_that_of_cross_entropy_and_stays_finite_for_extreme_logits() -> None:
    _, model, _ = whole_model(a_spec(), ALONE)
    logits = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(0)) * 1e4
    targets = tokens_of(a_spec(), 0)[1]
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    (3 * model.loss(mine, targets)).backward()  # type: ignore[no-untyped-call]
    (3 * F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="sum")).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None and mine.grad.isfinite().all()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"tied": True}, {"tied": True, "dropout": 0.2}])
def test_stages_by_hand_equal_one(options: dict[str, Any]) -> None:
    spec = a_spec(**options)
    _, model, leaves = whole_model(spec, ALONE)
    losses = step_gradients(spec, model, leaves)
    for cuts in ((0, 2, 4), (0, 1, 2, 3, 4)):
        parts = [leaves_of(spec, ALONE, a, b) for a, b in pairwise(cuts)]
        stages = [PROGRAM.build(spec, a, b, ALONE, part) for (a, b), part in zip(pairwise(cuts), parts, strict=True)]
        staged = []
        for micro_batch in range(2):
            hidden, targets = tokens_of(spec, micro_batch)
            for stage in stages[:-1]:
                hidden = stage(hidden, number(micro_batch), number(3))
                assert (hidden.shape, hidden.dtype) == (stage.hidden_shape, stage.hidden_dtype)
                assert hidden.is_contiguous()
            logits = stages[-1](hidden, number(micro_batch), number(3))
            assert logits.shape == stages[-1].logits_shape
            loss = stages[-1].loss(logits, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            staged.append(loss.item())
        assert staged == losses
        for part in parts:
            for use, leaf in part.items():
                expected = leaves[use].grad
                assert leaf.grad is not None and expected is not None
                assert torch.equal(leaf.grad, expected), use


def test_uses_of_a_tied_line_sum_to_the_gradient_of_one_parameter() -> None:
    spec = a_spec(tied=True)
    _, model, leaves = whole_model(spec, ALONE)
    step_gradients(spec, model, leaves)
    shared = leaves_of(spec, ALONE)
    shared["embedding", 3] = shared["embedding", 0]
    step_gradients(spec, PROGRAM.build(spec, 0, 4, ALONE, shared), shared)
    uses = [leaves["embedding", layer].grad for layer in (0, 3)]
    assert uses[0] is not None and uses[1] is not None and not torch.equal(uses[0], uses[1])
    torch.testing.assert_close(uses[0] + uses[1], shared["embedding", 0].grad)


def test_recomputing_activations_gives_the_same_bits() -> None:
    gradients = []
    for recompute in (False, True):
        spec = a_spec(train={"activation_checkpointing": recompute}, dropout=0.3)
        _, model, leaves = whole_model(spec, ALONE)
        losses = step_gradients(spec, model, leaves)
        gradients.append((losses, [leaf.grad for leaf in leaves.values()]))
    (losses, grads), (again, grads_again) = gradients
    assert losses == again
    for grad, other in zip(grads, grads_again, strict=True):
        assert grad is not None and other is not None and torch.equal(grad, other)


@pytest.mark.parametrize("model", [{}, {"dropout": 0.1}, {"layers": 1, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 160}])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activation_estimate_is_near_what_autograd_keeps(model: dict[str, object], dtype: str, recompute: bool) -> None:
    spec = a_spec(train={"sequence": 64, "dtype": dtype, "activation_checkpointing": recompute}, **model)
    leaves = leaves_of(spec, ALONE)
    parameters = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    profile = PROGRAM.describe(spec)
    hungriest = 0
    x = tokens_of(spec, 0)[0]
    outputs = []
    for layer in range(profile.num_layers):
        stage = PROGRAM.build(spec, layer, layer + 1, ALONE, leaves)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            x = stage(x, number(0), number(1))
            outputs.append(stage.loss(x, tokens_of(spec, 0)[1]) if layer == profile.num_layers - 1 else x)
        hungriest = max(hungriest, sum(kept.values()))
    assert 0.7 * hungriest <= profile.activation_bytes <= 1.3 * hungriest


def test_bf16_is_near_fp32() -> None:
    losses, grads = {}, {}
    for dtype in ("fp32", "bf16"):
        spec = a_spec(train={"dtype": dtype})
        _, model, leaves = whole_model(spec, ALONE)
        losses[dtype] = step_gradients(spec, model, leaves)
        grads[dtype] = torch.cat([leaf.grad.float().flatten() for leaf in leaves.values() if leaf.grad is not None])
        assert model.hidden_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert torch.linalg.norm(grads["bf16"] - grads["fp32"]) < 2e-2 * torch.linalg.norm(grads["fp32"])


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    spec, deeper = a_spec(), a_spec(layers=8)
    lines = {line.name: line for line in PROGRAM.describe(spec).lines}
    q, o = lines["layers.1.q"], lines["layers.1.o"]
    assert torch.equal(PROGRAM.initial(spec, q), PROGRAM.initial(deeper, q))
    assert not torch.equal(PROGRAM.initial(spec, q), PROGRAM.initial(spec, lines["layers.2.q"]))
    assert not torch.equal(PROGRAM.initial(spec, q), PROGRAM.initial(a_spec(train={"seed": 1}), q))
    assert torch.equal(PROGRAM.initial(spec, lines["final_norm"]), torch.ones(32))
    assert PROGRAM.initial(spec, q).std().item() == pytest.approx(0.02, rel=0.1)
    assert PROGRAM.initial(spec, lines["embedding"]).std().item() == pytest.approx(1.0, rel=0.05)
    assert PROGRAM.initial(a_spec(tied=True), lines["embedding"]).std().item() == pytest.approx(0.02, rel=0.05)
    assert PROGRAM.initial(spec, o).std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def test_dropout_drops_its_share_and_depends_on_every_part_of_its_key() -> None:
    rows = torch.arange(2000)
    masks = [
        keep_mask(rows, 64, 0.2, 0, "dropout", step, micro, layer)
        for step in (1, 2)
        for micro in (0, 1)
        for layer in (1, 2)
    ]
    for i, mask in enumerate(masks):
        assert mask.float().mean().item() == pytest.approx(0.8, abs=0.005)
        assert mask.float().mean(0).std() < 0.02 and mask.float().mean(1).std() < 0.08
        for other in masks[i + 1 :]:
            # Independent masks agree where both keep or both drop: 0.8^2 + 0.2^2.
            assert (mask == other).float().mean().item() == pytest.approx(0.68, abs=0.01)
        assert (mask[:, 1:] == mask[:, :-1]).float().mean().item() == pytest.approx(0.68, abs=0.01)
        assert (mask[1:] == mask[:-1]).float().mean().item() == pytest.approx(0.68, abs=0.01)
    assert torch.equal(keep_mask(rows[700:], 64, 0.2, 0, "dropout", 1, 0, 1), masks[0][700:])


def test_dropout_changes_with_step_and_micro_batch_but_not_between_calls() -> None:
    spec = a_spec(dropout=0.5)
    _, model, _ = whole_model(spec, ALONE)
    inputs, _ = tokens_of(spec, 0)
    first = model(inputs, number(0), number(1))
    assert torch.equal(first, model(inputs, number(0), number(1)))
    assert not torch.equal(first, model(inputs, number(1), number(1)))
    assert not torch.equal(first, model(inputs, number(0), number(2)))


def test_shapes_follow_the_tensor_parallel_degree() -> None:
    spec = a_spec()
    tp = Group("tp", (Rank(0), Rank(1)), 1, None)
    stage = PROGRAM.build(spec, 1, 2, tp, leaves_of(spec, tp, 1, 2))
    assert stage.hidden_shape == (2, 8, 32)
    assert stage.logits_shape == (2, 16, 128)
