"""What waits to be reported with the next iteration, and the reserved output that carries it."""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from sluice_engine import core_encoding, core_messages


class ReportOutbox:
    """Reports of one engine, from the scheduler to the serving process."""

    def __init__(self) -> None:
        self._returned: list[str] = []
        self._refused: list[core_messages.RefusedHandOff] = []
        self._pulled: list[core_messages.PulledPart] = []
        self._last_submit_numbers: dict[int, int] = {}
        self._last_load: core_messages.SchedulerLoad | None = None

    @property
    def has_news(self) -> bool:
        """True while something waits that an idle engine has to report too."""
        return bool(self._returned or self._refused or self._pulled)

    def note_submit(self, extras: core_messages.RequestExtras) -> None:
        """Notes a submit that the next load includes."""
        if extras.submit_number:
            self._last_submit_numbers[extras.stream_number] = extras.submit_number

    def note_returned(self, request_ids: list[str]) -> None:
        """Notes prompts that go back to their routers."""
        self._returned += request_ids

    def note_refused(self, request_id: str, reason: str) -> None:
        """Notes an accepted hand-off that was given up."""
        self._refused.append(core_messages.RefusedHandOff(request_id=request_id, reason=reason))

    def note_pulled(self, part: core_messages.PulledPart) -> None:
        """Notes what came of a part pull."""
        self._pulled.append(part)

    def send(
        self,
        outputs: dict[int, EngineCoreOutputs],
        load: core_messages.SchedulerLoad,
        iteration: core_messages.IterationReport | None,
        proposals: list[core_messages.ProposedMove],
        prefixes: core_messages.PrefixChanges | None = None,
    ) -> None:
        """Adds a report to an iteration's outputs, unless nothing has changed.

        Args:
            outputs: vLLM's outputs by client; the serving process is client 0.
            load: Load after the iteration.
            iteration: What it computed, if anything.
            proposals: Requests that should leave.
            prefixes: Changes of the prefix cache, if any.
        """
        if iteration is None and not self.has_news and prefixes is None and load == self._last_load:
            return
        report = core_messages.SchedulerReport(
            load=load,
            iteration=iteration,
            proposals=proposals,
            returned=self._returned,
            refused=self._refused,
            last_submit_numbers=self._last_submit_numbers,
            prefixes=prefixes,
            pulled_parts=self._pulled,
        )
        self._last_load = load
        self._returned, self._refused, self._pulled, self._last_submit_numbers = [], [], [], {}
        output = EngineCoreOutput(
            request_id=core_messages.REPORT_ID, new_token_ids=[], kv_transfer_params=core_encoding.encode_report(report)
        )
        outputs.setdefault(0, EngineCoreOutputs(outputs=[])).outputs.append(output)
