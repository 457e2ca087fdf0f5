"""The life of an event loop in a thread of its own."""

from __future__ import annotations

import asyncio


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, end what is under way then, and close it."""
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
    finally:
        loop.close()


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
