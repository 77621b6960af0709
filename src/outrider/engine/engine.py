"""The engine: one step, for prefill, decoding and verification, for every method alike."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.cache.pages import Cache
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import FAMILIES
from outrider.config import EngineOptions, SpeculativeOptions
from outrider.control import Controller
from outrider.control.fixed import FixedController
from outrider.control.prefill import PrefillPacer
from outrider.core.block_table import PAGE
from outrider.core.clock import Times, Work
from outrider.core.types import NO_STATES, Batch, Commit, Row
from outrider.draft import methods_of
from outrider.drafting.base import Drafter, Target
from outrider.engine.adapters import Adapters
from outrider.engine.runner import ForwardOutput, Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.turn import Turn, in_turn
from outrider.errors import CapacityError, ConfigError
from outrider.models import load as models
from outrider.models.decoder import Decoder
from outrider.models.placement import pick_device, place
from outrider.models.selftest import bit_exact
from outrider.sampling.sampler import Sampler
from outrider.verify import rules

log = logging.getLogger("outrider")


class Engine:
    """Loads a target and a drafter, and steps.  Rows go in by `add`, come out of `step` when they emitted something.

    reading, decoding: what the steps that computed prompts did, and the others.
    `exact`: the numbers of a token do not depend on what is computed beside it, so that match gives the same text bit for bit.
    """

    def __init__(self, options: EngineOptions, speculation: SpeculativeOptions) -> None:
        self.options = options
        self.turn = Turn()
        self.checkpoint = Checkpoint.open(options.model, options.revision, options.trust_remote_code)
        self.ending = (
            self.checkpoint.ending
        )  # read now: a corrupt file is found while loading, not while answering
        self.device = pick_device(options.device)
        self.max_len = self._length(options)
        dtype = self.checkpoint.dtype(options.dtype, self.device)
        where = place(self.checkpoint.spec.layers, self.device, options.gpu_layers)
        self.decoder = models.load(
            self.checkpoint,
            dtype,
            self.device,
            self.max_len,
            options.quantization,
            options.kv_cache_dtype,
            where,
        )
        self.exact = self.decoder.exact and bit_exact(self.decoder)
        if not self.exact:
            log.warning(
                "on %s the same text with and without speculation is likely but not promised bit for bit",
                self.decoder.kernels.name,
            )
        self.adapters = self._adapters() if options.enable_lora else None
        self.sampler = Sampler(self.decoder.kernels)
        self.target = Target(
            self.decoder,
            self.checkpoint,
            self.sampler,
            self.checkpoint.spec.vocabulary,
            self.max_len,
            methods_of,
        )
        self.use(self.new_drafter(speculation), speculation)

    def target_for(self, speculation: SpeculativeOptions) -> Target:
        """The target as a drafter sees it under the verification rule of `speculation`."""
        return replace(self.target, needs_probs=speculation.rule.drawn)

    def new_drafter(self, speculation: SpeculativeOptions) -> Drafter:
        return speculation.method.create(speculation.options, self.target_for(speculation))

    def use(self, drafter: Drafter, speculation: SpeculativeOptions) -> None:
        """Puts a drafter to work, with a fresh cache.  No row may be in flight.  Where it raises, all stays as it was."""
        controller = FixedController(speculation.control, drafter.depth, drafter.size, self.target.vocabulary)
        most = drafter.size(controller.most)
        if most > controller.most and not speculation.rule.branches:
            trees = ", ".join(name for name, rule in rules().items() if rule.branches and rule.lossless)
            rule, method = (
                type(thing).__module__.rpartition(".")[2] for thing in (speculation.rule, drafter)
            )
            raise ConfigError(
                f'verification "{rule}" judges chains, and "{method}" guesses trees here: choose one of {trees}.'
            )
        pages = self._pages(self.decoder.footprint + drafter.footprint(self.decoder.device), most)
        cache = Cache(pages, self.max_len + most + PAGE, self.options.enable_prefix_caching)
        pool = self.decoder.pool(pages * PAGE)
        storage = drafter.allocate(pages * PAGE, pool)
        cache.pools = [pool, *storage.pools]
        for own in storage.caches:
            own.prefix_caching = cache.prefix_caching
        self.drafter, self.rule, self.cache = drafter, speculation.rule, cache
        self.drafter_caches = storage.caches
        self.verify: Callable[[Batch, ForwardOutput], None] = self.rule
        self.controller: Controller = controller
        self.runner = Runner(self.decoder, pool, self.sampler, self.rule.same)
        self.pacer = PrefillPacer(self.options.max_num_batched_tokens, self.options.max_decode_slowdown)
        self.scheduler = Scheduler(
            cache,
            self.options.max_num_seqs,
            self.options.max_num_batched_tokens,
            controller.nodes,
            drafter.filled,
            drafter.forget,
            self.pacer.budget,
            self.adapters,
            drafter.needs.lookbehind,
        )
        self.reset()

    def _adapters(self) -> Adapters:
        if not isinstance(self.decoder, Decoder):
            raise ConfigError(
                f"enable_lora is for {', '.join(FAMILIES)}, not for {self.checkpoint.spec.architecture}: leave it out."
            )
        return Adapters(self.decoder, self.options.max_loras, self.options.max_lora_rank)

    @in_turn
    def step(self) -> list[Row]:
        """One forward of the target for every row that can run.  Returns the rows that emitted tokens or failed.

        Raises RequestError where it is called from inside a step.
        """
        began = time.perf_counter()
        batch = self.scheduler.next()
        if not batch.steps:
            assert not self.busy, "rows are waiting and none can run"
            return batch.failed
        self.scheduler.reserve(batch, self.controller.budget(batch))
        propose = time.perf_counter()
        batch.take(self.drafter.propose(batch))
        self.controller.trim(batch)
        forward = time.perf_counter()
        output = self.runner.forward(batch, self.drafter.needs)
        after = time.perf_counter()
        self.verify(batch, output)
        output.record_logprobs()
        self.scheduler.clip(batch)
        self.scheduler.commit(batch)
        commit = self._commit(batch, output)
        self.drafter.observe(commit)
        finished = self._finish(batch)
        times = Times(forward - propose, after - forward, time.perf_counter() - after + propose - began)
        self.controller.learn(commit, times)
        self.pacer.learn(batch, sum(times))
        (self.reading if batch.prefill else self.decoding).add(batch, times)
        return finished

    def _commit(self, batch: Batch, output: ForwardOutput) -> Commit:
        now, lossless = time.perf_counter(), self.rule.lossless
        for step in batch:
            if step.emitted:
                step.row.count(step, now, lossless)
        if output.needs.topk:
            output.find_topk()
        return Commit(batch, output.states() if output.kept else NO_STATES)

    def _finish(self, batch: Batch) -> list[Row]:
        """Rows that emitted or failed; those that ended leave the engine."""
        for row in batch.rows:
            if row.finish_reason is not None:
                if row.error is None:
                    self.scheduler.share(row)  # with what the drafter has read since they were entered
                self.scheduler.retire(row)
        return batch.failed + [step.row for step in batch if step.emitted or step.row.error]

    def add(self, row: Row) -> None:
        self.scheduler.add(row)

    def restart(self, rows: Sequence[Row]) -> None:
        """Undo a step that raised: queues and caches are empty, and `rows` as before it, to be added again."""
        for row in rows:
            row.undo()
        self.scheduler.clear(rows)
        for cache in self.caches:
            cache.clear()

    def reset(self) -> None:
        """Starts the clock anew."""
        self.reading, self.decoding = Work(), Work()

    @property
    def times(self) -> Times:
        return Times(*map(sum, zip(self.reading.times, self.decoding.times)))

    @property
    def steps(self) -> int:
        return self.reading.steps + self.decoding.steps

    @property
    def caches(self) -> list[Cache]:
        """Every allocator: the target's, and what the drafter has of its own."""
        return [self.cache, *self.drafter_caches]

    def forget_prefixes(self) -> None:
        """Empties the prefix index, so that a measurement starts cold."""
        for cache in self.caches:
            cache.forget()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def check(self) -> None:
        """Proves that no slot is lost or owned twice; with nothing in flight, that none is owned at all."""
        for cache in self.caches:
            cache.check()
            assert self.busy or (not cache.tables and cache.available == cache.pages), (
                "a finished row still holds pages"
            )

    def _length(self, options: EngineOptions) -> int:
        """Tokens a request may have.  Raises ConfigError beyond the model's context."""
        spec, wanted = self.checkpoint.spec, options.max_model_len
        if wanted is None:
            return spec.unscaled
        if wanted > spec.context:
            raise ConfigError(
                f"max_model_len {wanted} exceeds the {spec.context} positions of {options.model!r}: "
                f"give at most {spec.context}."
            )
        if wanted > spec.unscaled:
            log.warning(
                "RoPE of %s is scaled for texts of %d tokens, whatever the length of a request; transformers "
                "does not scale up to %d tokens. For its short texts set max_model_len to at most that.",
                options.model,
                wanted,
                spec.unscaled,
            )
        return wanted

    def _pages(self, memory: Counter[torch.device], draft_tree: int) -> int:
        """How many pages the K/V memory holds.  Raises CapacityError if not even one full request fits."""
        one = -(-self.max_len // PAGE)  # guesses take what is free: they need no room of their own
        wanted = -(-(self.max_len + draft_tree) // PAGE) * self.options.max_num_seqs
        given, share = self.options.kv_cache_memory_bytes, self.options.gpu_memory_utilization
        rooms = (
            [(given, memory.total())]
            if given
            else [(free_memory(device, share), size) for device, size in memory.items()]
        )
        limit, slot_bytes = min(rooms, key=lambda room: room[0] / room[1])
        pages = limit // (slot_bytes * PAGE)
        if given is None:
            pages = min(pages, wanted)
        if pages < one:
            raise CapacityError(
                f"K/V memory of {limit:,} bytes holds {pages * PAGE} tokens, one request of max_model_len {self.max_len} needs "
                f"{one * PAGE} ({one * PAGE * slot_bytes:,} bytes): raise kv_cache_memory_bytes or lower max_model_len."
            )
        return pages


def free_memory(device: torch.device, share: float) -> int:
    """Bytes that K/V may take by default: a quarter of what is free on a CPU, `share` of the GPU less what is in use."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - share) * whole))
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 // 4
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
