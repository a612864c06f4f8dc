"""Element-wise optimizers over this rank's parts of the parameters: AdamW and SGD.

A step hands plain tensors to torch's kernels: of a DTensor its local part, so that nothing is dispatched for each
parameter. Parameters, gradients and state stay what they are for everybody else; the state of a DTensor is a DTensor
with its placements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.groups import ParamGroup
from mindspeed_mm.optimizer.state_homes import Piece, Resident, StateHome

Groups = Iterable[torch.Tensor] | Iterable[ParamGroup]


class ElementWise(torch.optim.Optimizer):
    """An optimizer that the device can tell to skip a step. All parameters of a group have one device and dtype.

    Attributes:
        grad_scale: float scalar that the kernel divides gradients by; None: it takes them as they are. Needs `fused`.
        found_inf: float scalar; 1: `step` leaves parameters and state unchanged. None: it always steps. It is told
            the host later, by `take_back`, as counts of steps may be there.
        divides: whether `GuardedOptimizer` gives `grad_scale`; False: it multiplies the gradients before the step.
        home: where the state is between steps.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    divides = False
    home: StateHome

    def __init__(self, groups: Groups, defaults: dict[str, Any], *, fused: bool, home: StateHome | None = None) -> None:
        """
        Args:
            groups: parameters, or parameter groups.
            defaults: values of groups without their own.
            fused: call torch's fused kernels; False: its foreach kernels, a chunk of parameters at a time.
            home: None: the state is beside the parameters.
        """
        super().__init__(list(groups), {**defaults, "fused": fused})
        self.home = Resident() if home is None else home
        self._counted: list[tuple[Any, Any]] = []

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the state tensors that have the shape of their parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        if self.param_groups:  # Megatron's optimizers step once more, without groups, and take nothing back
            self._counted = []
        for group in self.param_groups:
            busy = [p for p in group["params"] if p.grad is not None]
            if not busy:
                self._count(group, busy)
                continue
            names = self.state_names(group)
            self.home.ensure(self.state, group, names, busy)
            found_inf, grad_scale = _beside(busy[0], self.found_inf), _beside(busy[0], self.grad_scale)
            steps = self._count(group, busy)
            for piece in self.home.pieces(self.state, group, names, busy, steps, found_inf):
                if group["fused"]:
                    self._fused(group, piece, grad_scale, found_inf)
                else:
                    self._foreach_unless(group, piece, found_inf)

    @torch.no_grad()
    def ensure_state(self) -> None:
        """Create the missing state of all parameters, as their first step would, and let the host read it.

        A tower may have been idle so far, but saving and loading a checkpoint need the same entries for all.
        """
        for group in self.param_groups:
            self.home.ensure(self.state, group, self.state_names(group), group["params"])
            self._ensure_counts(group, group["params"])
        self.home.settle()

    def take_back(self) -> None:
        """Restore counts of steps on the host, once it knows that the last step was skipped."""
        for owner, before in self._counted:
            if isinstance(owner, torch.Tensor):
                owner.copy_(before)
            elif before is None:
                owner.pop("step", None)
            else:
                owner["step"] = before
        self._counted = []

    def _foreach_unless(self, group: ParamGroup, piece: Piece, found_inf: torch.Tensor | None) -> None:
        """Step by foreach kernels, and put back what they changed if `found_inf` is 1."""
        changed = [piece.params, *piece.states]
        kept = [] if found_inf is None else [_flat(tensors) for tensors in changed]
        self._foreach(group, piece)
        if found_inf is not None:
            for tensors, before in zip(changed, kept, strict=True):
                after = torch.where(found_inf == 0, _flat(tensors), before)
                parts = after.split([t.numel() for t in tensors])
                torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])

    def _ensure_counts(self, group: ParamGroup, params: list[torch.Tensor]) -> None:
        """Create the missing counts of steps."""

    def _count(self, group: ParamGroup, busy: list[torch.Tensor]) -> list[torch.Tensor]:
        """Count the step that begins; returns each parameter's count with it, or nothing if the kernel needs none."""
        return []

    def _fused(
        self, group: ParamGroup, piece: Piece, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        raise NotImplementedError

    def _foreach(self, group: ParamGroup, piece: Piece) -> None:
        raise NotImplementedError


class AdamW(ElementWise):
    """torch.optim.AdamW, bit for bit, over this rank's parts. State: `exp_avg`, `exp_avg_sq`, `step`."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool,
        home: StateHome | None = None,
    ) -> None:
        """See `ElementWise` and torch.optim.AdamW."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults, fused=fused, home=home)
        self.divides = fused

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """See `ElementWise`."""
        return "exp_avg", "exp_avg_sq"

    def _ensure_counts(self, group: ParamGroup, params: list[torch.Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if "step" not in state:  # the fused kernel reads it on the device, the foreach one on the host
                device = param.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)

    def _count(self, group: ParamGroup, busy: list[torch.Tensor]) -> list[torch.Tensor]:
        if not busy:
            return []
        self._ensure_counts(group, busy)
        steps = [self.state[param]["step"] for param in busy]
        if not group["fused"]:
            self._counted += zip(steps, torch._foreach_add(steps, 0.0), strict=True)
            torch._foreach_add_(steps, 1.0)
        elif (found_inf := _beside(busy[0], self.found_inf)) is None:
            torch._foreach_add_(steps, 1.0)
        else:
            # with alpha, as torch would read the tensor to call the overload for numbers
            torch._foreach_add_(steps, 1.0 - found_inf, alpha=1.0)
        return steps

    def _fused(
        self, group: ParamGroup, piece: Piece, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        torch._fused_adamw_(
            piece.params,
            piece.grads,
            *piece.states,
            [],
            piece.steps,
            **_adam_options(group),
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _foreach(self, group: ParamGroup, piece: Piece) -> None:
        before = list(torch._foreach_sub(piece.steps, 1.0))  # the function counts by itself
        options = _adam_options(group)
        adamw(
            piece.params, piece.grads, *piece.states, [], before, foreach=True, amsgrad=False, maximize=False, **options
        )


class SGD(ElementWise):
    """torch.optim.SGD over this rank's parts. State: `momentum_buffer`, if there is momentum."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        fused: bool,
        home: StateHome | None = None,
    ) -> None:
        """See `ElementWise` and torch.optim.SGD."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(groups, defaults, fused=fused, home=home)

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """See `ElementWise`."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def _fused(
        self, group: ParamGroup, piece: Piece, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        torch._fused_sgd_(
            piece.params,
            piece.grads,
            *(piece.states or ([],)),
            **_sgd_options(group),
            is_first_step=False,  # a momentum of zeros has been made: the first step sets it to the gradient
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _foreach(self, group: ParamGroup, piece: Piece) -> None:
        momenta: list[Any] = piece.states[0] if piece.states else [None] * len(piece.params)
        sgd(piece.params, piece.grads, momenta, foreach=True, **_sgd_options(group))


class FusedAdam(AdamW):
    """AdamW with Apex's surface, for Megatron-core: `step` in the parameter group, for all of its parameters."""

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        """
        Raises:
            ValueError: `adam_w_mode` is False.
        """
        if not adam_w_mode:
            raise ValueError("FusedAdam: adam_w_mode=False, weight decay in the gradient, is not supported")
        fused = accelerator.current().supports_fused_optimizers()
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)
        self.divides = False

    def _ensure_counts(self, group: ParamGroup, params: list[torch.Tensor]) -> None:
        """Megatron-core expects no entry of a group that has not been stepped."""

    def _count(self, group: ParamGroup, busy: list[torch.Tensor]) -> list[torch.Tensor]:
        if not group["params"]:
            return []
        self._counted.append((group, group.get("step")))
        group["step"] = group.get("step", 0) + 1
        if not busy:
            return []
        # filled where the kernel reads it: a copy of the host's number would wait for the device
        device = busy[0].device if group["fused"] else "cpu"
        return [torch.full((), float(group["step"]), device=device)] * len(busy)


def _adam_options(group: ParamGroup) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
    }


def _sgd_options(group: ParamGroup) -> dict[str, Any]:
    return {
        "lr": group["lr"],
        "momentum": group["momentum"],
        "weight_decay": group["weight_decay"],
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }


def _beside(param: torch.Tensor, scalar: torch.Tensor | None) -> torch.Tensor | None:
    """Return a scalar in the device's memory if the parameter is there; the other way would wait for the device."""
    current = accelerator.current()
    if scalar is None or current.holds(scalar) or not current.holds(param):
        return scalar
    return scalar.to(param.device)


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
