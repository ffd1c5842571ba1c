"""Runs probes one after another. However a probe ends, the next one begins with a clean server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from lora_serve.check.answers import MalformedAnswerError
from lora_serve.check.findings import NotSupportedError, ProbeFailedError, Violation
from lora_serve.check.lab import Lab
from lora_serve.check.probe import Outcome, Probe, Verdict
from lora_serve.check.server import ServerFaultError
from lora_serve.check.versions import prepare

TIMEOUTS_OF_A_PROBE = 10  # times that of a call
SLOW = "--timeout"  # said of calls that took too long
EXIT_PASSED, EXIT_FAILED, EXIT_NOT_RUN = 0, 1, 2


async def run(lab: Lab, probes: Sequence[Probe], timeout_seconds: float) -> AsyncIterator[Outcome]:
    """Yield each probe's outcome. After the server has stopped to answer, the rest are errors."""
    await prepare(lab)
    gone = ""
    for probe in probes:
        if gone:
            yield Outcome(probe=probe, verdict=Verdict.ERROR, note=gone)
            continue
        outcome = await _outcome(lab, probe, timeout_seconds * TIMEOUTS_OF_A_PROBE)
        if outcome.verdict in (Verdict.FAIL, Verdict.ERROR) and (why := await _death(lab)):
            gone = f"the server no longer answers since {probe.name}"
            outcome = _with_death(outcome, why)
        else:
            await lab.clean()
        yield outcome


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 if a probe failed; 2 if one could not be run to its end, or if none said anything."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if Verdict.FAIL in verdicts:
        return EXIT_FAILED
    if Verdict.ERROR in verdicts or Verdict.PASS not in verdicts:
        return EXIT_NOT_RUN
    return EXIT_PASSED


async def _outcome(lab: Lab, probe: Probe, limit_seconds: float) -> Outcome:
    lab.server.exchanges.clear()
    started = time.monotonic()
    outcome = Outcome(probe=probe, verdict=Verdict.PASS)
    try:
        for need in probe.needs:
            lab.require(need)
        async with asyncio.timeout(limit_seconds):
            outcome = replace(outcome, note=await probe.run(lab))
    except NotSupportedError as error:
        outcome = replace(outcome, verdict=Verdict.UNSUPPORTED, note=str(error))
    except ProbeFailedError as error:
        violation = error.violation
        outcome = replace(outcome, verdict=Verdict.FAIL, note=violation.what, violation=violation)
    except (ServerFaultError, MalformedAnswerError) as error:
        outcome = replace(outcome, verdict=Verdict.ERROR, note=str(error))
    except TimeoutError:
        note = f"not done in {limit_seconds:g} s; a slow server needs a longer --timeout"
        outcome = replace(outcome, verdict=Verdict.ERROR, note=note)
    except Exception as error:  # whatever a server made of us: the others are still worth running
        note = f"the probe itself failed: {type(error).__name__}: {error}"
        outcome = replace(outcome, verdict=Verdict.ERROR, note=note)
    seconds = time.monotonic() - started
    return replace(outcome, seconds=seconds, exchanges=tuple(lab.server.exchanges))


async def _death(lab: Lab) -> str:
    """Why a short request is not answered; empty if it is, or is refused as a mistake of ours."""
    try:
        await lab.server.complete(lab.body(lab.base, "Hello", max_tokens=1))
    except ServerFaultError as error:
        return "" if 400 <= error.status < 500 else str(error)
    return ""


def _with_death(outcome: Outcome, why: str) -> Outcome:
    """The outcome of a probe after which the server was gone. What is only slow is an error."""
    if outcome.verdict is Verdict.FAIL or SLOW in why:
        return replace(outcome, note=f"{outcome.note}; {why}")
    violation = Violation(what=f"The server died of this probe's requests: {outcome.note}; {why}")
    return replace(outcome, verdict=Verdict.FAIL, note=violation.what, violation=violation)
