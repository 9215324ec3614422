"""``resolve_ops``: what was forced runs or raises, and the table says what runs and why."""

from __future__ import annotations

import pytest
import torch

from engine.ops import registry, resolve_ops
from engine.ops.native import usable_isas
from engine.ops.reference import ReferenceOps
from engine.ops.registry import ISA_VARIABLE, OPS


def test_ops_are_the_public_methods_of_the_reference() -> None:
    """A new reference op that the registry does not know would never run."""
    public = {name for name, value in vars(ReferenceOps).items() if callable(value)}
    assert {name for name in public if not name.startswith("_")} == {*OPS, "pack_linear"}


def test_auto_runs_every_op_natively_and_says_so() -> None:
    ops = resolve_ops(num_threads=2)
    table = ops.explain()
    assert [choice.op for choice in table] == list(OPS)
    assert {choice.backend for choice in table} == {"native"}
    assert all(ops.isa in choice.reason and "2 threads" in choice.reason for choice in table)
    assert ops.num_threads == 2
    assert str(ops).count("native") == len(OPS)


def test_the_bound_functions_are_the_backend_that_the_table_names() -> None:
    """Proves which backend runs, not which one is printed."""
    ops = resolve_ops({"linear": "reference"}, num_threads=1)
    for op, backend, _ in ops.explain():
        bound = getattr(ops, op)
        owner = type(bound.__self__).__name__
        assert owner == {"reference": "ReferenceOps", "native": "CpuOps"}[backend], op
    assert type(ops.pack_linear(torch.ones(2, 2))).__name__ == "ReferenceLinear"


def test_forced_reference_uses_nothing_native() -> None:
    ops = resolve_ops("reference", num_threads=1)
    assert {(choice.backend, choice.reason) for choice in ops.explain()} == {
        ("reference", "forced")
    }
    assert ops.isa == "none"


@pytest.mark.parametrize("isa", usable_isas())
def test_forced_isa_runs(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_ops("native", isa=isa, num_threads=1).isa == isa
    monkeypatch.setenv(ISA_VARIABLE, isa)
    ops = resolve_ops("native", num_threads=1)
    assert ops.isa == isa
    assert ISA_VARIABLE in ops.explain()[0].reason
    assert resolve_ops("native", isa="scalar", num_threads=1).isa == "scalar"  # the argument wins


def test_what_cannot_run_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [
        ({"backend": {"conv": "native"}}, "got conv"),
        ({"backend": {"pack_linear": "native"}}, "got pack_linear"),
        ({"backend": "cuda"}, "backend of linear: expected one of auto, native, reference"),
        ({"backend": {"sample": "triton"}}, "backend of sample: expected one of"),
        ({"device": "cuda"}, "device: expected cpu, got 'cuda'"),
        ({"isa": "neon9"}, "isa: expected auto or one of scalar.*got neon9"),
        ({"num_threads": 0}, "num_threads: expected 1..1024, got 0"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            resolve_ops(**arguments)
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="got mmx"):
        resolve_ops()


def test_without_the_native_module_auto_says_why_and_native_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing falls back in silence: the table and a warning name the reason."""
    monkeypatch.setattr(registry, "native_unavailable", lambda: "it was not built")
    ops = resolve_ops(num_threads=1)
    assert {(c.backend, c.reason) for c in ops.explain()} == {
        ("reference", "auto: it was not built")
    }
    assert caplog.text.count("it was not built") == len(OPS)
    for backend in ("native", {"sample": "native"}):
        with pytest.raises(ValueError, match="native was forced but cannot run: it was not built"):
            resolve_ops(backend, num_threads=1)
    caplog.clear()
    resolve_ops("reference", num_threads=1)
    assert not caplog.text


def test_two_tables_in_one_process_do_not_share_a_choice() -> None:
    one = resolve_ops("native", isa="scalar", num_threads=1)
    two = resolve_ops("native", num_threads=2)
    assert (one.isa, one.num_threads) == ("scalar", 1)
    assert two.num_threads == 2
    weight, x = torch.randn(24, 12), torch.randn(3, 12)
    first, second = torch.empty(3, 24), torch.empty(3, 24)
    one.linear(x, two.pack_linear(weight), first)  # the packed layout is one for all
    two.linear(x, one.pack_linear(weight), second)
    assert torch.equal(first, second)
