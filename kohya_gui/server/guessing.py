"""Slow down guessing of the token or the password: each wrong guess from an address delays its next ones."""

import asyncio
import math
import string
from collections import OrderedDict

FIRST_DELAY, MAX_DELAY = 0.5, 60.0  # seconds of delay after the first wrong guess, and at most
MAX_ADDRESSES = 1024  # addresses in memory
MAX_WAITING = 8  # waiting requests per address; more are refused
MIN_TOKEN_BITS = 128  # of a token, at least


class Guesses:
    """The wrong guesses of each address, and a lock for each, so that its guesses are judged one at a time."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}

    def suspect(self, address: str) -> bool:
        # Wrong guesses are forgotten after a right one.
        return address in self._wrong

    async def wait(self, address: str) -> bool:
        """Wait as long as an address's wrong guesses demand; false if too many of its requests are waiting already."""
        if self._waiting.get(address, 0) >= MAX_WAITING:
            return False
        self._waiting[address] = self._waiting.get(address, 0) + 1
        try:
            async with self._locks.setdefault(address, asyncio.Lock()):
                # The exponent has a limit, as 2**1100 would overflow a float.
                await asyncio.sleep(min(MAX_DELAY, FIRST_DELAY * 2 ** min(self._wrong.get(address, 0), 20)))
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
        self._wrong.pop(address, None)


def bits(token: str) -> float:
    """Return the maximum entropy of a token in bits, if drawn from the kinds of characters in it."""
    kinds = ("0123456789", "abcdef", string.ascii_lowercase[6:], string.ascii_uppercase)
    size = sum(len(kind) for kind in kinds if any(character in kind for character in token))
    size += 32 * any(not character.isalnum() for character in token)
    # The second limit is for tokens that repeat a few characters, which were not drawn at random.
    return min(len(token) * math.log2(max(size, 1)), 8.0 * len(set(token)) * math.log2(len(token) + 1))
