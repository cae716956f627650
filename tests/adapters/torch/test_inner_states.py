"""The states that optimizers of PyTorch will have, found out before their first step."""

from types import SimpleNamespace

import pytest

from grace.core.config.outer import make_outer
from grace.core.errors import ConfigError

torch = pytest.importorskip("torch")

from grace.core.session.inner import InnerSteps  # noqa: E402
from grace.torch.outer import PlainOptimizer  # noqa: E402

ONE = SimpleNamespace(rank=0, size=1)


def found(optimizer, p):
    steps = InnerSteps(
        make_outer({"every": 2, "state": "average"}), PlainOptimizer(optimizer, {p: "w"}, {}), ONE, "here"
    )
    return {spec.name.removesuffix(" of w"): spec.shape for spec in steps.specs}


class NoDefault(torch.optim.SGD):
    """An optimizer whose learning rate has no default."""

    def __init__(self, params, lr, momentum):
        super().__init__(params, lr=lr, momentum=momentum)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("NoDefault", {"momentum": 0.9}),
        ("AdamW", {"amsgrad": True}),
        ("Adafactor", {}),
        ("RMSprop", {"centered": True}),
    ],
)
def test_states_are_those_after_a_first_step(name, options):
    p, calls = torch.nn.Parameter(torch.ones(4, 3)), []
    optimizer = (NoDefault if name == "NoDefault" else getattr(torch.optim, name))([p], lr=0.1, **options)
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    optimizer.register_step_post_hook(lambda *given: calls.append(given))
    before = found(optimizer, p)
    assert not optimizer.state.get(p)
    assert not calls
    assert (p == 1).all()
    p.grad = torch.ones(4, 3)
    optimizer.step()
    after = {key: tuple(x.shape) for key, x in optimizer.state[p].items() if torch.is_tensor(x) and x.ndim}
    assert before == after == found(optimizer, p)
    assert after


def test_an_optimizer_that_needs_more_is_told_to_step_first():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="the states of LBFGS are known after its first step only, and a copy of it"):
        found(torch.optim.LBFGS([p]), p)
