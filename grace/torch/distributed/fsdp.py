"""The exchange of models that FSDP2 (`torch.distributed.fsdp.fully_shard`) has sharded.

FSDP reduces the gradients of each of its modules by a reduce-scatter: a rank gets the mean of its own part of each
parameter. With replicas (HSDP), the ranks that hold the same part add it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# They have no public names. An `FSDPModule` does not tell what a reduce-scatter contains, and it has no place for
# another all-reduce of its own replicas.
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

from grace.core.communicators.auto import Auto
from grace.core.communicators.reduce_scatter import ReduceScatter
from grace.core.config.config import Config
from grace.core.config.registry import communicators
from grace.core.errors import ConfigError, StateError, StepError
from grace.core.guards.agreement import agree, formats
from grace.core.plan.plan import Modules, Plan
from grace.core.session.start import Request, Session, describe
from grace.core.spec import Ranks, TensorSpec
from grace.core.state.checks import check_mapping
from grace.core.state.run import Run
from grace.core.step.step import Step
from grace.torch.distributed.ddp import call_after_backward, wait_for
from grace.torch.distributed.library import TorchDistributed
from grace.torch.distributed.transport import ProcessGroupTransport
from grace.torch.exchange import OPS
from grace.torch.loss_scale import check_scaler
from grace.torch.model import ModelExchange
from grace.torch.references import References
from grace.torch.tensors import parameters_of


class _Tensor(NamedTuple):
    """A parameter of FSDP that trains, under its name in the model."""

    name: str
    # FSDP's `FSDPParam`.
    sharded: Any

    @property
    def numel(self) -> int:
        """Number of elements on all ranks together."""
        return self.sharded._orig_size.numel()  # type: ignore[no-any-return]

    @property
    def chunk(self) -> int:
        """Number of elements of each rank, padding included."""
        return self.sharded.padded_sharded_param_size.numel()  # type: ignore[no-any-return]

    def chunk_on(self, ranks: int) -> int:
        """Return `chunk` on another number of ranks. Raises StateError if the order of elements depends on it."""
        if self.sharded.fsdp_placement.dim:
            raise StateError(
                f"checkpoint: tensor '{self.name}' is not sharded by rows, so its elements have another order on "
                "another number of ranks; load the checkpoint on as many ranks as saved it."
            )
        rows = int(self.sharded._orig_size[0])
        return -(-rows // ranks) * self.numel // rows

    def part(self, rank: int) -> int:
        """Return the number of elements of a rank, which is smaller on the last ones if they do not fill all parts."""
        return max(0, min(self.chunk, self.numel - rank * self.chunk))

    @property
    def local(self) -> torch.Tensor:
        """The part of this rank."""
        return self.sharded.sharded_param.detach().to_local()


@dataclass
class _Group:
    """A module of FSDP, whose parameters are reduced together. `params` is FSDP's `FSDPParamGroup`."""

    name: str
    module: FSDPModule
    params: Any
    tensors: list[_Tensor]

    def spec(self, tensor: _Tensor, *, whole: bool, scaled: bool) -> TensorSpec:
        """Return the spec of the gradients that are exchanged: of the whole parameter, or of this rank's part."""
        policy, p = self.params.mp_policy, tensor.sharded.sharded_param
        dtype = policy.reduce_dtype or policy.param_dtype or p.dtype
        if scaled and dtype == torch.float16:
            # Without the loss scale, gradients may be too small for it.
            dtype = torch.float32
        shape = tensor.sharded._orig_size if whole else tensor.sharded.sharded_size
        return TensorSpec(tensor.name, tuple(shape), str(dtype).removeprefix("torch."), str(self.params.device))


class ShardedExchange(ModelExchange):
    """The exchange of a model that FSDP2 has sharded. `modules` holds the module of each tensor."""

    def __init__(
        self,
        model: torch.nn.Module,
        session: Session,
        library: TorchDistributed,
        scaler: torch.amp.GradScaler | None,
        groups: Sequence[_Group],
        modules: Modules,
    ) -> None:
        self._model, self._groups, self._modules = model, groups, modules
        self._tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
        mesh = groups[0].params.mesh_info
        self._replicated = isinstance(mesh, HSDPMeshInfo)
        if self._replicated:
            self.part = mesh.shard_mesh_rank, mesh.shard_mesh_size
        self._within_replica = mesh.shard_process_group
        # Connects the parts of a replica, once advice or "auto" needs values of all of them.
        self._of_parts: ProcessGroupTransport | None = None
        super().__init__(session, library, {}, scaler)
        self._begun = False
        # The second gradients of each module as FSDP would reduce them, while they are computed, and afterwards.
        self._recording: dict[str, list[torch.Tensor]] | None = None
        self._second: dict[str, list[torch.Tensor]] = {}
        self._references = References(self, self.names(), self._record, lambda: model)
        self._note_steps()

    def names(self) -> dict[torch.Tensor, str]:
        """Return the names of the parameters as they are now: `load_state_dict(assign=True)` replaces them."""
        return {tensor.sharded.sharded_param: name for name, tensor in self._tensors.items()}

    def exchanged_parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it exchanges, as they are sharded now."""
        return [tensor.sharded.sharded_param for tensor in self._tensors.values()]

    @contextmanager
    def _record(self) -> Iterator[None]:
        """Let backward passes leave gradients on this rank, as FSDP would reduce them."""
        self._reshard()
        self._recording = {}
        try:
            yield
            self._second = self._recording
        finally:
            self._recording = None
            self._reshard()

    def _reshard(self) -> None:
        """Let the next pass gather parameters: FSDP may have kept those of the last one, with other weights."""
        for group in self._groups:
            group.module.reshard()

    def records(self, module: str, gradients: torch.Tensor) -> bool:
        """Return whether gradients of a module are second ones, which are kept and not exchanged."""
        if self._recording is None:
            return False
        self._recording.setdefault(module, []).append(gradients.clone())
        return True

    def second(self, module: str) -> torch.Tensor | None:
        """Return the second gradients of a module's next reduction; None if there are none."""
        found = self._second.get(module)
        return found.pop(0) if found else None

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Do what `ModelExchange.evaluate` does; all passes but the last need `set_requires_gradient_sync(False)`."""
        self._references.names = self.names()
        try:
            return super().evaluate(closure)
        finally:
            self._second = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Surround a part of the exchange in a backward pass; the first one begins a step."""
        with self.rollback.attempt(), torch.no_grad():
            if not self._begun:
                self._begun = True
                call_after_backward(self._end)
                self.begin_step()
                self.comparisons.finish()
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank, and with replicas its part; every rank must save its own."""
        state = super().state_dict()
        return state if self.part is None else {**state, "part": list(self.part)}

    def _load(self, run: Run, rank: int, state: Any) -> tuple[bool, str]:
        chosen = self._of_part(state)
        earlier = self._earlier_of(chosen, rank)
        result = super()._load(run, rank, chosen)
        self.earlier = earlier and {name: self._place(earlier[name], t.local) for name, t in self._tensors.items()}
        return result

    def _earlier_of(self, state: Any, rank: int) -> Mapping[str, torch.Tensor] | None:
        """Return what a state that is to be loaded has of the weights at which second gradients are computed.

        Raises StateError if other ranks had other parts.
        """
        given = state if isinstance(state, list) else [state]
        if all(each.get("earlier") is None for each in given):
            return None
        place = rank, self.size
        own = [each for each in given if self.part is not None or (each.get("rank"), each.get("size")) == place]
        if not own:
            raise StateError(
                "checkpoint: for second gradients, it has the earlier weights of a part of each parameter, expected "
                f"those of rank {rank} of {self.size}, received others; load it on as many ranks, each its own state."
            )
        return check_mapping(own[0]["earlier"], "earlier")

    def _of_part(self, state: Any) -> Any:
        """Return a state, or of a list those of the ranks that hold this rank's part.

        Raises StateError if the model had other parts.
        """
        given = state if isinstance(state, list) else [state]
        parts = [check_mapping(each, "the state of grace").get("part") for each in given]
        mine = None if self.part is None else list(self.part)
        chosen = [each for each, part in zip(given, parts, strict=True) if part == mine]
        if given and not chosen:
            received = ", ".join(sorted({_in_words(part) for part in parts})[:5])
            raise StateError(
                f"checkpoint: expected states of {_in_words(mine)}, received those of {received}; load it on a mesh "
                "with as many parts, and pass this rank's own state or a list with those of all ranks."
            )
        return chosen if isinstance(state, list) else state

    def _end(self) -> None:
        self._begun = False
        self.step_ends()
        self.end_step()

    def _forget_pass(self) -> None:
        self._begun = False
        if self._of_parts is not None:
            # It may have failed on some ranks only.
            self._of_parts.close()
            self._of_parts = None
        if cast(FSDPModule, self._model)._get_fsdp_state()._is_root is not None:
            # FSDP may have been interrupted in a pass. Afterwards the model has its sharded parameters again. Before
            # its first pass, FSDP has nothing to return to.
            self._model.reset_iter_state()
        self._model.zero_grad()
        for tensor in self._tensors.values():
            # FSDP does not forget the gradients of modules that it had not reduced, and would add to them.
            tensor.sharded.unsharded_accumulated_grad = None
            if hasattr(tensor.sharded, "_unsharded_param"):
                tensor.sharded._unsharded_param.grad = None

    def everyone(self, mine: Any, purpose: str, what: str) -> list[Any]:
        rows = super().everyone(mine, purpose, what)
        if not self._replicated:
            return rows
        if self._of_parts is None:
            self._of_parts = _connect_parts(self._within_replica, self.config.timeout, what)
        # The prefix names the ranks of one part.
        return _of_all_parts(self._of_parts, rows, f"grace/sharded/{purpose}", what)

    def gathers(self) -> list[tuple[int, int]]:
        found = []
        for group in [] if self._replicated else self._groups:
            sizes = (p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in group.params.fsdp_params)
            # Parameters that are sharded again after the forward pass are gathered for the backward pass as well.
            found.append((sum(sizes), 1 + (group.params.post_forward_mesh_info is not None)))
        return found

    def _plan_of(self, config: Config) -> Plan:
        _check_config(config, self._modules)
        return super()._plan_of(config)

    def _possible_ranks(self, size: int) -> list[Ranks]:
        return [Ranks(size)]

    def _modules_for(self, ranks: Ranks) -> Modules:
        if self._replicated or ranks == self.ranks:
            return self._modules
        chunks = tuple((name, tensor.chunk_on(ranks.size)) for name, tensor in self._tensors.items())
        return self._modules._replace(communicator=ReduceScatter(chunks))

    def _weights(self) -> Mapping[str, torch.Tensor]:
        # Without replicas, every rank has other parts.
        return {name: tensor.local for name, tensor in self._tensors.items() if self._replicated}


class _Reduction:
    """The exchange of one module's gradients, in place of a collective that FSDP would call."""

    def __init__(self, group: _Group, exchange: ShardedExchange, process_group: Any) -> None:
        self._group, self._exchange, self._run = group, exchange, exchange.run
        self._process_group = process_group
        self._tensor_of = {tensor.sharded: tensor for tensor in group.tensors}
        self._named = {tensor.name: tensor for tensor in group.tensors}

    def _present(self, length: int) -> dict[str, int]:
        """Return the start of each tensor in FSDP's buffer, of `length` elements per rank; frozen ones are not there.

        Parameters that were not used are there with zeros, because of `set_reduce_scatter_unused_params`.
        """
        starts, at = {}, 0
        for param in self._group.params.fsdp_params:
            if not param.sharded_param.requires_grad:
                continue
            if param not in self._tensor_of:
                raise StepError(
                    f"a parameter of module '{self._group.name}' was frozen when the model was registered, and trains "
                    "now: expected the same parameters to train, or fewer. Unfreeze it before you call "
                    "grace.torch.register()."
                )
            starts[self._tensor_of[param].name] = at
            at += self._tensor_of[param].chunk
        if at != length:
            raise StepError(
                f"module '{self._group.name}': expected gradients of {at:,} elements per rank, received {length:,}. "
                "Freeze parameters before the forward pass, and leave set_reduce_scatter_unused_params(True) as it is."
            )
        return starts

    @contextmanager
    def _surround_reduction(self, length: int, rows: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Surround the exchange of rows, by their part, of `length` elements each; tell the advisor of it."""
        with self._exchange.attempt():
            if self._exchange.advisor is not None:
                for name, at in self._present(length).items():
                    lengths = {i: self._named[name].part(i) for i in rows}
                    self._exchange.note_gradient(name, *(row[at : at + lengths[i]] for i, row in rows.items()))
            yield
        if next(iter(rows.values())).device.type == "cpu":
            # On a GPU, the pass goes on at once.
            self._exchange.resume()

    def _finish(self, into: Mapping[str, torch.Tensor], factor: float) -> None:
        """Complete the step, and write each mean times the factor to its place."""
        for name, merged in self._run.finish(into, module=self._group.name).items():
            if name in into:
                if merged.data_ptr() != into[name].data_ptr():
                    into[name].copy_(merged.view(-1))
                if factor != 1:
                    into[name].mul_(factor)

    @property
    def _step(self) -> Step:
        """The module's step under way."""
        return self._run.current_of(self._group.name)

    def _dense(self) -> str:
        return f"step {self._step.number}, the dense gradients of module '{self._group.name}'"

    def _unscale(self, x: torch.Tensor) -> torch.Tensor:
        """Return gradients without the loss scale, in the dtype of their specs; x is changed if it has it.

        Raises StepError if they are of another one, because the model was converted.
        """
        scale = self._exchange.loss_scale
        wide = x.float() if scale.has_scaler and x.dtype == torch.float16 else x
        expected, received = self._step.plan.exchanged[0].spec.dtype, str(wide.dtype).removeprefix("torch.")
        if received != expected:
            raise StepError(
                f"module '{self._group.name}': expected gradients of {expected}, received {received}: the model was "
                "converted after it was registered. Convert it first, then shard it and call grace.torch.register()."
            )
        scale.unscale_(wide)
        return wide

    def _exchange_rows(
        self,
        output: torch.Tensor,
        merged: torch.Tensor,
        rows: Mapping[int, torch.Tensor],
        mine: int,
        factor: float,
        second: Mapping[int, torch.Tensor],
    ) -> None:
        """Exchange rows of unscaled gradients, by their part, and write the means of part `mine` to FSDP's buffer.

        The means times the factor are made in `merged`, which may be a row or the buffer itself. `second` has the rows
        of second gradients, if there are any.
        """
        present, into = self._present(len(output)), {}
        for item in self._step.plan.exchanged:
            tensor = self._named[item.spec.name]
            start = present.get(tensor.name)
            if start is None:
                # Frozen since the start.
                self._step.rest(tensor.name)
                continue
            if tensor.part(mine):
                into[tensor.name] = merged[start : start + tensor.part(mine)]
            parts, others = (
                [row[start : start + tensor.part(i)] for i, row in each.items() if tensor.part(i)]
                for each in (rows, second)
            )
            self._step.ready_in_parts(tensor.name, parts, torch.cat(others) if others else None)
        self._finish(into, factor)
        self._exchange.loss_scale.scale_(merged)
        if merged is not output:
            output.copy_(merged)


class GradientScatter(_Reduction):
    """The reduce-scatter of a module's gradients: each rank gets the mean of its own part. FSDP calls it."""

    def __init__(self, group: _Group, exchange: ShardedExchange, process_group: Any) -> None:
        super().__init__(group, exchange, process_group)
        self._plain = group.params._reduce_scatter_comm

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer, as FSDP's own."""
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce the rows of the input, one per rank, and write this rank's to the output."""
        if self._exchange.records(self._group.name, input_tensor):
            output_tensor.zero_()
            return None
        rows = dict(enumerate(input_tensor.view(self._run.transport.size, -1)))
        with self._surround_reduction(len(output_tensor), rows):
            if not self._step.plan.buckets:
                # It counts the step.
                self._finish({}, 1.0)
                # Gloo's reduce-scatter does not tell when it is done, so grace cannot limit the wait.
                return self._plain(output_tensor, input_tensor, group, op, async_op)
            self._scatter(output_tensor, input_tensor, op)
            return None

    def _scatter(self, output: torch.Tensor, data: torch.Tensor, op: Any) -> None:
        rank, size = self._run.transport.rank, self._run.transport.size
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise StepError(
                f"module '{self._group.name}': expected a reduction to the mean or the sum, received {op}. With "
                "set_gradient_divide_factor(), call set_force_sum_reduction_for_comms(True) on every FSDP module."
            )
        data = self._unscale(data)
        rows, second = dict(enumerate(data.view(size, -1))), self._exchange.second(self._group.name)
        others = {} if second is None else dict(enumerate(self._unscale(second).view(size, -1)))
        merged = output if data.dtype == output.dtype else torch.zeros_like(output, dtype=data.dtype)
        self._exchange_rows(output, merged, rows, rank, 1.0 if op == dist.ReduceOp.AVG else float(size), others)


class ReplicaSum(_Reduction):
    """The mean of this rank's part over the replicas, after FSDP has reduced within each of them (HSDP)."""

    def __call__(self, reduced: torch.Tensor) -> None:
        """Replace the gradients by their mean over all replicas."""
        assert self._exchange.part is not None
        if self._exchange.records(self._group.name, reduced):
            return
        mine = self._exchange.part[0]
        with self._surround_reduction(len(reduced), {mine: reduced}):
            if not self._group.params.all_reduce_grads:
                raise StepError(
                    "set_requires_all_reduce(False) cannot be used with grace, which adds the gradients of the "
                    "replicas in every reduction; use set_requires_gradient_sync(False) to accumulate gradients."
                )
            # FSDP does not divide further if it was given a factor.
            total = self._group.params.gradient_divide_factor is not None
            if not self._step.plan.buckets:
                mean_or_sum = dist.ReduceOp.SUM if total else dist.ReduceOp.AVG
                work = dist.all_reduce(reduced, mean_or_sum, self._process_group, async_op=True)
                assert work is not None
                wait_for(work, reduced, self._run.transport, self._dense)
                self._finish({}, 1.0)
                return
            merged, second = self._unscale(reduced), self._exchange.second(self._group.name)
            others = {} if second is None else {mine: self._unscale(second)}
            factor = float(self._run.transport.size) if total else 1.0
            self._exchange_rows(reduced, merged, {mine: merged}, mine, factor, others)


def register_sharded(
    model: FSDPModule, request: Request, *, grad_scaler: torch.amp.GradScaler | None
) -> ShardedExchange:
    """Let grace exchange the gradients of a sharded model; see `grace.torch.register`."""
    where = request.where
    groups = _groups(model, where)
    mesh = groups[0].params.mesh_info
    replicated = isinstance(mesh, HSDPMeshInfo)
    process_group = mesh.replicate_process_group if replicated else mesh.shard_process_group
    library = TorchDistributed(process_group, request.timeout)
    # Without replicas, no two ranks hold the same weights.
    library.advice = "Give all replicas the same weights before you train, for example by the same seed or checkpoint."
    transport = library.transport

    def gather(mine: Any) -> list[Any]:
        # All models use the same name. So ranks with different numbers of models still compare.
        name, what = "grace/sharded/agree", f"{where}()"
        rows = transport.gather_objects(mine, name, what)
        if not replicated:
            return rows
        of_parts = _connect_parts(mesh.shard_process_group, request.timeout, what)
        try:
            return _of_all_parts(of_parts, rows, name, what)
        finally:
            of_parts.close()

    with library.session(request, "sharded", gather) as session:
        made = session.config
        _check_groups(groups, where)
        scaler = check_scaler(grad_scaler, [t.local for group in groups for t in group.tensors], where)
        scaled = scaler is not None
        tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
        every = [(group, tensor) for group in groups for tensor in group.tensors]
        whole = [group.spec(tensor, whole=True, scaled=scaled) for group, tensor in every]
        specs = [group.spec(tensor, whole=not replicated, scaled=scaled) for group, tensor in every]
        # The ranks of the last parts may hold nothing of a small parameter.
        specs = [spec for spec in specs if spec.numel]
        modules = Modules(
            {tensor.name: group.name for group in groups for tensor in group.tensors},
            None if replicated else ReduceScatter(tuple((name, tensor.chunk) for name, tensor in tensors.items())),
        )
        _check_config(made, modules)
        run = session.begin(
            specs, OPS, average=True, delegate=lambda item: item.dense, modules=modules, references=True, auto=True
        )
        session.local = {
            "model number": session.number,
            "grad_scaler": scaled,
            "modules": dict(modules.of),
            **describe(made, whole, [], OPS),
        }
    # The ranks of other parts may have other units.
    agree(
        formats([plan for _, plan in run.stages], OPS),
        None,
        lambda mine: transport.gather_objects(mine, f"{session.prefix}/formats", f"{where}()"),
        where,
    )
    exchange = ShardedExchange(cast(torch.nn.Module, model), session, library, scaler, groups, modules)
    exchange.loss_scale.attach_to(exchange.names)
    model.set_reduce_scatter_unused_params(True)
    for group in groups:
        kind = ReplicaSum if replicated else GradientScatter
        reduction = kind(group, exchange, process_group)
        if replicated:
            _leave_replicas(group.params)
            group.module.set_all_reduce_hook(reduction)
        else:
            group.module.set_custom_reduce_scatter(reduction)
    exchange.announce(run.stages)
    return exchange


def _connect_parts(group: Any, timeout: float, what: str) -> ProcessGroupTransport:
    """Return a transport between the ranks of a replica, which exchange no gradients by grace."""
    return ProcessGroupTransport(group, timeout=timeout, lanes=1, what=what)


def _of_all_parts(parts: ProcessGroupTransport, rows: list[Any], name: str, what: str) -> list[Any]:
    """Return the values of all ranks, from the `rows` of the ranks with this part."""
    return [value for row in parts.gather_objects(rows, name, what) for value in row]


def _in_words(part: Any) -> str:
    """Return which part of a model the state of a rank is of."""
    return "a model without replicas" if part is None else f"part {part[0]} of {part[1]}"


def _groups(model: FSDPModule, where: str) -> list[_Group]:
    """Return the modules of a model whose parameters train. Raises ConfigError if a model cannot be used."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"{where}: FSDP2 models need PyTorch 2.13 or newer, received {torch.__version__}; update PyTorch."
        )
    root = cast(torch.nn.Module, model)
    names = {p: name for name, p in parameters_of(root).items()}
    found: dict[Any, _Group] = {}
    for module_name, module in root.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for params in module._get_fsdp_state()._fsdp_param_groups:
            if params in found:
                continue
            trained = [param for param in params.fsdp_params if param.sharded_param.requires_grad]
            if any(param.sharded_param not in names for param in trained):
                raise ConfigError(
                    f"{where}: the parameters of module '{module_name}' are not sharded at the moment; call it before "
                    "the first forward pass, with the module that was passed last to fully_shard()."
                )
            tensors = [_Tensor(names[param.sharded_param], param) for param in trained]
            found[params] = _Group(module_name, module, params, [t for t in tensors if t.numel])
    groups = [group for group in found.values() if group.tensors]
    if not groups:
        raise ConfigError(f"{where}: no parameter of the model requires a gradient; expected at least one.")
    return groups


def _check_groups(groups: Sequence[_Group], where: str) -> None:
    """Raise ConfigError if FSDP exchanges gradients in a way that has no place for grace."""
    meshes = {group.params.mesh_info.mesh for group in groups}
    for group in groups:
        reason, params = None, group.params
        scatter = params._reduce_scatter_comm
        if len(group.module._get_fsdp_state()._fsdp_param_groups) > 1 or len(meshes) > 1:
            reason = "its parameters lie on several meshes; use one mesh for the whole model"
        elif not isinstance(params.mesh_info, FSDPMeshInfo):
            reason = "it is replicated and not sharded; wrap it in DistributedDataParallel"
        elif isinstance(scatter, _Reduction) or isinstance(params._all_reduce_hook, _Reduction):
            reason = "it is registered already; register each module once, with the outermost one"
        elif type(scatter).__module__ != _fsdp_collectives.__name__ and not isinstance(params.mesh_info, HSDPMeshInfo):
            reason = "its reduce-scatter is not FSDP's own; leave set_custom_reduce_scatter() out"
        elif params._all_reduce_hook is not None:
            reason = "it has an all-reduce hook already; leave set_all_reduce_hook() out"
        if reason:
            raise ConfigError(f"{where}: the FSDP module '{group.name}' cannot be used, because {reason}.")


def _check_config(config: Config, modules: Modules) -> None:
    """Raise ConfigError if the configuration names a communicator that FSDP's sharding does not allow."""
    if modules.communicator is None:
        return
    for method in (*(stage.method for _, stage in config.stages), *(rule.method for rule in config.rules)):
        if not isinstance(method.communicator, Auto):
            raise ConfigError(
                f"communicator '{communicators.name_of(method.communicator)}' brings every rank the whole mean, and "
                "FSDP needs a reduce-scatter; leave 'communicator' out."
            )


def _leave_replicas(params: Any) -> None:
    """Let FSDP reduce within the replica only: its own all-reduce over the replicas would come before the hook."""
    mesh = params.mesh_info
    assert isinstance(mesh, DDPMeshInfo)
    own = FSDPMeshInfo(mesh.mesh, shard_mesh_dim=mesh.shard_mesh_dim)
    if params.post_forward_mesh_info == mesh:
        params.post_forward_mesh_info = own
    params.mesh_info = own
