"""Several prompts in one request: their handles read as one, their numbers added up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tenure.errors import RequestError
from tenure.server.serves import Handle, Serves
from tenure.types import Done, Piece, Receipt, Request, Timings, Usage


def submit_all(serves: Serves, requests: Sequence[Request]) -> Handle:
    """Submit every request, or none: when one is refused, those before it are cancelled and the refusal is raised."""
    if len(requests) == 1:
        return serves.submit(requests[0])
    handles: list[Handle] = []
    try:
        for request in requests:
            handles.append(serves.submit(request))
    except RequestError:
        for handle in handles:
            handle.cancel()
        raise
    return Gathered(handles)


class Gathered:
    """The handles of a batch as one. The choices of prompt i follow those of the prompts before it."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        # Stands for all: the first one's, with everyone's choices.
        self._request = replace(handles[0].request, n=sum(handle.request.n for handle in handles))

    @property
    def request(self) -> Request:
        return self._request

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece | Done]:
        news: asyncio.Queue[Piece | Done | BaseException | None] = asyncio.Queue()
        readers = []
        first = 0
        for handle in self._handles:
            readers.append(asyncio.get_running_loop().create_task(_read(handle, first, news)))
            first += handle.request.n
        dones: dict[str, Done] = {}
        open_readers = len(readers)
        try:
            while open_readers:
                item = await news.get()
                if isinstance(item, Piece):
                    yield item
                elif isinstance(item, Done):
                    dones[item.request] = item
                elif item is None:
                    open_readers -= 1
                else:
                    raise item
        finally:
            for reader in readers:
                reader.cancel()
        if len(dones) == len(self._handles):
            yield gather([dones[handle.request.id] for handle in self._handles])


async def _read(handle: Handle, first: int, news: asyncio.Queue[Piece | Done | BaseException | None]) -> None:
    """Pass a handle's news on, its choices numbered from `first`; None at its end."""
    try:
        async for item in handle:
            news.put_nowait(replace(item, index=first + item.index) if isinstance(item, Piece) else item)
    except Exception as error:  # noqa: BLE001 (raised again by whoever reads the batch)
        news.put_nowait(error)
    news.put_nowait(None)


def gather(dones: Sequence[Done]) -> Done:
    """One last word for all: tokens are added, waits are the longest, and `parts` keeps each prompt's own."""
    usages = [done.usage for done in dones]
    times = [done.timings for done in dones]
    return Done(
        request=dones[0].request,
        usage=Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
        ),
        receipt=_gather_receipts([done.receipt for done in dones]),
        timings=Timings(
            prompt_n=sum(time.prompt_n for time in times),
            prompt_ms=max(time.prompt_ms for time in times),
            predicted_n=sum(time.predicted_n for time in times),
            predicted_ms=max(time.predicted_ms for time in times),
            cache_n=sum(time.cache_n for time in times),
            queue_ms=max(time.queue_ms for time in times),
        ),
        error=next((done.error for done in dones if done.error is not None), None),
        parts=tuple(dones),
    )


def _gather_receipts(receipts: Sequence[Receipt]) -> Receipt:
    by_tier: dict[str, int] = {}
    by_codec: dict[str, int] = {}
    for receipt in receipts:
        for sums, counts in ((by_tier, receipt.cached_by_tier), (by_codec, receipt.codec)):
            for name, count in counts.items():
                sums[name] = sums.get(name, 0) + count
    return replace(
        receipts[0],
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        cached_tokens=sum(receipt.cached_tokens for receipt in receipts),
        computed_tokens=sum(receipt.computed_tokens for receipt in receipts),
        cached_by_tier=by_tier,
        codec=by_codec,
        miss=next((receipt.miss for receipt in receipts if receipt.miss is not None), None),
        forgotten=tuple(part for receipt in receipts for part in receipt.forgotten),
        preempted=sum(receipt.preempted for receipt in receipts),
        recomputed_tokens=sum(receipt.recomputed_tokens for receipt in receipts),
        queue_ms=max(receipt.queue_ms for receipt in receipts),
        context_used=max(receipt.context_used for receipt in receipts),
        limit_cause=next((receipt.limit_cause for receipt in receipts if receipt.limit_cause is not None), None),
    )
