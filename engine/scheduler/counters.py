"""What the scheduler has done since the start."""

from dataclasses import dataclass

from engine.scheduler.plan import StepPlan


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Only ever grow. Only Scheduler writes."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_tokens_generated: int = 0
    num_steps_with_several_adapters: int = 0
    num_steps_with_several_chunks: int = 0
    max_adapters_in_step: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    def count_step(self, plan: StepPlan) -> None:
        """Count a step that has been computed."""
        self.num_steps += 1
        self.num_tokens_computed += plan.num_tokens
        self.num_steps_with_several_adapters += plan.num_adapters > 1
        self.num_steps_with_several_chunks += len(plan.chunks) > 1
        self.max_adapters_in_step = max(self.max_adapters_in_step, plan.num_adapters)
