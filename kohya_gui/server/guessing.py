"""Slow down whoever guesses the token or the password: each wrong guess of an address makes its next ones slower."""

import asyncio
import math
import string
from collections import OrderedDict

FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0  # seconds that the first wrong guess costs, and the most that any costs
MAX_ADDRESSES = 1024  # addresses that are remembered
WAITING = 8  # requests of an address that may wait at once; more are refused
BITS = 128  # of a token


class Guesses:
    """The wrong guesses of each address, and a lock for each so that its guesses are judged one after the other."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}

    def suspect(self, address: str) -> bool:
        """Whether an address has guessed wrong and not right since."""
        return address in self._wrong

    async def wait(self, address: str) -> bool:
        """Wait as long as the wrong guesses of an address ask for; false if too many of its requests wait already."""
        if self._waiting.get(address, 0) >= WAITING:
            return False
        self._waiting[address] = self._waiting.get(address, 0) + 1
        try:
            async with self._locks.setdefault(address, asyncio.Lock()):
                await asyncio.sleep(min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self._wrong.get(address, 0), 20)))
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address], self._locks[address]
        return True

    def wrong(self, address: str) -> None:
        """Count a wrong guess."""
        self._wrong[address] = self._wrong.pop(address, 0) + 1
        while len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Forget the wrong guesses of an address that knows the secret."""
        self._wrong.pop(address, None)


def bits(token: str) -> float:
    """The bits that a token has at most, if it was drawn from the kinds of characters that are in it."""
    kinds = ("0123456789", "abcdef", string.ascii_lowercase[6:], string.ascii_uppercase)
    size = sum(len(kind) for kind in kinds if any(one in kind for one in token))
    size += 32 * any(not one.isalnum() for one in token)
    return min(len(token) * math.log2(max(size, 1)), 8.0 * len(set(token)) * math.log2(len(token) + 1))
