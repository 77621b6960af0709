"""The engine: one step for prefill, decode and verification, for every drafting method."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outrider.backends.select import adopt_threads
from outrider.cache.pages import Cache
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import ATTENTION_ONLY, listed
from outrider.config import EngineOptions, SpeculativeOptions
from outrider.control import Controller
from outrider.control.fixed import FixedController
from outrider.control.prefill import PrefillPacer
from outrider.core.clock import Times, Work, one_recording, working_time
from outrider.core.device import DeviceEvent
from outrider.core.row import Row
from outrider.core.step import NO_STATES, Batch, Commit
from outrider.draft import automatic, methods_of
from outrider.draft.union.joined import Joined
from outrider.drafting.base import Drafter, Target
from outrider.engine.adapters import Adapters
from outrider.engine.adaptive import AdaptiveControllers
from outrider.engine.flights import Flight, controller_of, report_of
from outrider.engine.memory import build_cache, longest
from outrider.engine.row_states import RowStates
from outrider.engine.runner import ForwardOutput, Runner
from outrider.engine.scheduler import Hooks, Limits, Scheduler
from outrider.engine.turn import Turn
from outrider.errors import ConfigError
from outrider.models import load as models
from outrider.models.base import Model
from outrider.models.placement import Precision, pick_device, pick_dtype, place
from outrider.models.selftest import bit_exact
from outrider.online.learner import Learner
from outrider.parallel import load as parallel
from outrider.sampling.sampler import Sampler
from outrider.verify import rules
from outrider.verify.base import Rule

log = logging.getLogger("outrider")


class Engine:
    """Target, drafter, scheduler and cache.  `add` queues a row; `step` returns the rows that emitted tokens.

    prefill, decode: statistics of the steps with prompt tokens, and of the others.
    exact: the target is row-invariant (bit for bit), so match verification reproduces decoding without
    speculation.
    """

    def __init__(self, options: EngineOptions, speculation: SpeculativeOptions) -> None:
        self.options = options
        self.turn = Turn()
        self.checkpoint = Checkpoint.open(options.model, options.revision, options.trust_remote_code)
        self.ending = self.checkpoint.ending  # read now: loading reports a corrupt file
        self.device = pick_device(options.device)
        self.max_len = longest(options, self.checkpoint.spec)
        self.decoder = self._load_target(options)
        self.exact = self.decoder.exact and bit_exact(self.decoder)
        if not self.exact:
            log.warning(
                "on %s the same text with and without speculation is likely but not promised bit for bit",
                self.decoder.backend.name,
            )
        self.adapters = self._adapters() if options.enable_lora else None
        self.sampler = Sampler(self.decoder.backend)
        self.controllers = AdaptiveControllers(
            self.decoder, self.checkpoint, options, self.device, self.max_len
        )
        vocabulary = self.checkpoint.spec.vocabulary
        self.target = Target(
            self.decoder, self.checkpoint, self.sampler, vocabulary, self.max_len, methods_of,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )  # fmt: skip
        self.use(self.new_drafter(speculation), speculation)

    def target_for(self, speculation: SpeculativeOptions) -> Target:
        """The target as a drafter sees it under the verification rule and the controller of `speculation`."""
        rule, adaptive = speculation.rule, speculation.adaptive
        return replace(self.target, needs_probs=rule.needs_probs, kernel=rule.kernel, adaptive=adaptive)

    def new_drafter(self, speculation: SpeculativeOptions) -> Drafter:
        """The drafter of a configuration, for `use`."""
        return speculation.method.create(speculation.options, self.target_for(speculation))

    def _load_target(self, options: EngineOptions) -> Model:
        """The target on its devices or ranks."""
        dtype = pick_dtype(options.dtype, self.checkpoint.stored_dtype, self.device)
        precision = Precision(dtype, options.quantization, options.kv_cache_dtype, options.activations)
        args = self.checkpoint, precision, self.device, self.max_len
        if options.layout.size > 1:
            return parallel.load(*args, options.layout, options.revision)
        return models.load(*args, place(self.checkpoint.spec.layers, self.device, options.gpu_layers))

    def use(self, drafter: Drafter, speculation: SpeculativeOptions) -> None:
        """Install a drafter and a verification rule, with a fresh cache.

        No row may be in flight.  Leaves the engine as it was where it raises.
        """
        limits = FixedController(speculation.control, drafter.depth, drafter.size, self.target.vocabulary)
        max_nodes = drafter.size(limits.max_depth)
        if max_nodes > limits.max_depth:
            refuse_chain_rules(speculation.rule, drafter)
        online = speculation.online
        learner = None if online is None else Learner(drafter, online, self)
        memory = build_cache(self.decoder, drafter, self.max_len, max_nodes, self.options)
        adaptive = self.controllers.make(drafter, limits, speculation) if speculation.adaptive else []
        texts = [method(method.Options(), self.target) for method in automatic()]
        # from here on nothing raises
        self.drafter, self.rule, self.learner = drafter, speculation.rule, learner
        self.cache, self.drafter_caches = memory.cache, memory.drafter_caches
        self.max_num_seqs = memory.max_num_seqs
        self.proposer = Joined(drafter, texts, learner)
        self.verify: Callable[[Batch, ForwardOutput], None] = self.rule
        self.flights, self.overlap = deque[Flight](), self.decoder.stages  # steps in flight at once
        # whether one is in flight between two calls of `step`
        self.ahead = self.decoder.in_process and self.decoder.device.type != "cpu"
        self.prompts_read: DeviceEvent | None = None  # by the drafters, of the last step
        # whether events have to tell a controller what took how long
        self.times_device = bool(adaptive) and self.decoder.device.type == "cuda"
        self.adaptive = adaptive
        for each in adaptive:
            each.settles = self.ahead
        self.controller: Controller = adaptive[0] if adaptive else limits
        self.row_states = RowStates.of(self.cache)
        self.runner = Runner(
            self.decoder, self.cache.pools[0], self.sampler, self.rule.kernel, self.row_states
        )
        self.pacer = PrefillPacer(self.options.max_num_batched_tokens, self.options.max_decode_slowdown)
        self.scheduler = self.build_scheduler()
        self.reset()

    def build_scheduler(self) -> Scheduler:
        """A scheduler for the drafter, controller and pacer in use."""
        drafter, options = self.drafter, self.options
        limits = Limits(self.max_num_seqs, options.max_num_batched_tokens, drafter.needs.lookbehind)
        hooks = Hooks(self._likely, self.pacer.budget, drafter.filled, self.proposer.forget)
        return Scheduler(self.cache, limits, hooks, self.adapters)

    def _likely(self, rows: int) -> int:
        return max(each.likely(rows) for each in (self.controller, *self.adaptive))

    def _adapters(self) -> Adapters:
        if not self.decoder.adapts:
            name = self.checkpoint.spec.architecture
            raise ConfigError(f"enable_lora is for {listed(ATTENTION_ONLY, name)}, not {name}: leave it out.")
        return Adapters(self.decoder, self.options.max_loras, self.options.max_lora_rank)

    def step(self) -> list[Row]:
        """Run one forward for every row that can run.  Returns the rows that emitted tokens or failed.

        On a pipeline, steps of `overlap` groups of rows overlap: begin those that can, and complete one.
        A device computes the next step while the caller passes on what this one has emitted (`ahead`).
        Raises RequestError if called from inside a step.
        """
        return self.turn.run(self._step)

    def _step(self) -> list[Row]:
        with one_recording:
            rows = self._launch()
            if self.flights:
                rows += self._complete(self.flights.popleft())
                if self.ahead:
                    rows += self._launch()
                    self._settle()
                return rows
            assert not self.busy, "rows are waiting and none can run"
            return rows

    def _launch(self) -> list[Row]:
        """Begin steps until `overlap` are in flight.  Returns the rows that failed."""
        failed: list[Row] = []
        for _ in range(self.overlap - len(self.flights)):
            began = working_time()
            batch = self.scheduler.next(self.overlap)
            failed += batch.failed
            if not batch:
                break
            self.flights.append(self._begin(batch, began))
            if self.overlap > 1 or self.ahead:
                self.scheduler.in_flight.update(batch.rows)
        return failed

    def _settle(self) -> None:
        """Let the controller take in what steps have shown while the device computes the next one."""
        if self.adaptive:
            began = working_time()
            self.adaptive[0].settle(computes=bool(self.flights))
            if self.flights:
                self.flights[-1].forward += working_time() - began

    def abort(self, row: Row) -> None:
        """End a row between two steps.

        One in flight leaves when its step is completed; a step ahead whose rows have all ended is dropped.
        """
        self.scheduler.abort(row)
        if self.ahead and self.flights and all(each.finish_reason for each in self.flights[0].batch.rows):
            for each in self.flights.popleft().batch.rows:
                self.scheduler.in_flight.discard(each)
                self.scheduler.retire(each)

    def _begin(self, batch: Batch, began: float) -> Flight:
        """Draft for a batch, and begin its forward."""
        controller = self.controller
        if self.overlap > 1 and self.adaptive:  # each step in flight has its own
            controller = controller_of(batch, self.adaptive, self.flights)
        self.scheduler.reserve(batch, self.proposer.budgets(batch, controller))
        planned = working_time()
        batch.take(self.proposer.propose(batch))
        controller.trim(batch)
        proposed, drafted = working_time(), None
        if self.times_device and (batch.prefill or any(step.budget.depth for step in batch)):
            drafted = DeviceEvent(self.decoder.device)
        complete = self.runner.begin(batch, self.drafter.needs)
        propose, rest = proposed - planned, planned - began
        if self.learner is not None:
            propose -= self.learner.taken()
        forward = working_time() - proposed
        return Flight(batch, controller, complete, propose, forward, rest, drafted)

    def _complete(self, flight: Flight) -> list[Row]:
        """Wait for the forward of a step, and verify and commit its drafts."""
        if self.prompts_read is not None:
            self.prompts_read.wait()
        batch, (output, began) = flight.batch, flight.result()
        self.verify(batch, output)
        output.record_logprobs()
        self.scheduler.clip(batch)
        self.scheduler.commit(batch)
        if self.row_states is not None:
            self.row_states.settle(batch)
        commit = self._commit(batch, output)
        observed, before = 0.0, working_time() if self.ahead else 0.0
        self.proposer.observe(commit)
        # Of a device, that it may still compute.  What drafters do with a prompt is no cost of drafts.
        if self.ahead and not batch.prefill:
            observed = working_time() - before
        reads = batch.prefill and self.times_device
        self.prompts_read = DeviceEvent(self.decoder.device) if reads else None
        finished = self._finish(batch)
        rest = working_time() - began - observed
        times = Times(flight.propose + observed, flight.forward, flight.rest + rest)
        if self.learner is not None:
            times = self.learner.charged(times)
        flight.controller.learn(commit, times)
        self.pacer.learn(batch, sum(times))
        (self.prefill if batch.prefill else self.decode).add(batch, times)
        return finished

    def _commit(self, batch: Batch, output: ForwardOutput) -> Commit:
        now, lossless, sources = time.perf_counter(), self.rule.lossless, self.proposer.sources
        for step in batch:
            if step.emitted:
                step.count(now, lossless, sources)
        if output.needs.topk:
            output.find_topk()
        return Commit(batch, output.states() if output.kept else NO_STATES)

    def _finish(self, batch: Batch) -> list[Row]:
        """The rows that emitted or failed; those that ended leave the engine."""
        changed: list[Row] = []
        for step in batch:
            row = step.row
            if row.finish_reason is not None:
                if row.error is None:
                    self.scheduler.share(row)  # the drafter may have filled more pages since the last commit
                self.scheduler.retire(row)
            if step.emitted or row.error:
                changed.append(row)
        return changed

    def add(self, row: Row) -> None:
        """Queue a row."""
        if self.learner is None:  # it lets torch use fewer threads for a while
            adopt_threads()
        if self.row_states is not None and not self.row_states.shares_prompt(row):
            row.source = None
        self.scheduler.add(row)

    def restart(self, rows: Sequence[Row]) -> None:
        """Undo all steps after one raised: empty queues and caches, and reset `rows` for another `add`."""
        self.flights.clear()
        for row in rows:
            row.undo()
        self.scheduler.clear(rows)
        for cache in self.caches:
            cache.clear()

    def reset(self) -> None:
        """Clear the statistics."""
        self.prefill, self.decode = Work(), Work()

    @property
    def times(self) -> Times:
        """Seconds of all steps since `reset`, by phase."""
        return Times(*map(sum, zip(self.prefill.times, self.decode.times)))

    @property
    def steps(self) -> int:
        """Number of steps since `reset`."""
        return self.prefill.steps + self.decode.steps

    @property
    def caches(self) -> list[Cache]:
        """Every page allocator: the target's, then those that only the drafter uses."""
        return [self.cache, *self.drafter_caches]

    def forget_prefixes(self) -> None:
        """Empty the prefix index, so that a measurement starts cold."""
        for cache in self.caches:
            cache.forget()

    def report(self) -> dict[str, Any]:
        """What the controllers chose and why, for people; empty if nothing is chosen."""
        return report_of(self.adaptive or [self.controller])

    @property
    def busy(self) -> bool:
        """Whether a row is queued or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def check(self) -> None:
        """Assert that no page is lost or owned twice, and that none is owned while nothing runs."""
        for cache in self.caches:
            cache.check()
            assert self.busy or (not cache.tables and cache.available == cache.pages), (
                "a finished row still holds pages"
            )


def refuse_chain_rules(rule: Rule, drafter: Drafter) -> None:
    """Raise ConfigError for a rule that cannot judge the trees of a drafter."""
    if not rule.branches:
        trees = ", ".join(name for name, rule in rules().items() if rule.branches and rule.lossless)
        raise ConfigError(
            f'verification "{module_name(rule)}" judges chains, and "{module_name(drafter)}" '
            f"drafts trees here: choose one of {trees}."
        )


def module_name(thing: object) -> str:
    """The name under which a method or rule is registered."""
    return type(thing).__module__.rpartition(".")[2]
