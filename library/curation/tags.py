"""Captions as lists of tags: count them, and edit many at once. Pure functions of text."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from library.config.problems import ConfigError

ACTIONS = ("add", "remove", "replace_tag", "replace_text")


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of many captions."""

    action: str  # of ACTIONS
    find: str = ""  # tags, separated like those of captions; for replace_text any text
    put: str = ""  # the replacement, or what is added
    at_end: bool = False  # where tags are added
    match_case: bool = False
    separator: str = ","

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(
                "action is {action}: use one of {actions}", action=repr(self.action), actions=", ".join(ACTIONS)
            )
        if self.action == "add" and not split_tags(self.put, self.separator):
            raise ConfigError("tags to add: write at least one")
        if self.action != "add" and not self.find.strip(" " if self.action == "replace_text" else None):
            raise ConfigError(
                "{what} to find: write something", what="text" if self.action == "replace_text" else "tags"
            )

    def apply(self, caption: str) -> str:
        """A caption after the edit, line by line; lines without a change are preserved exactly."""
        if self.action == "replace_text":
            flags = 0 if self.match_case else re.IGNORECASE
            return re.sub(re.escape(self.find), lambda _: self.put, caption, flags=flags)
        if not caption.strip() and self.action == "add":
            return self._joined(split_tags(self.put, self.separator))
        return "".join(self._line(line) for line in caption.splitlines(keepends=True))

    def _line(self, line: str) -> str:
        bare = line.rstrip("\r\n")
        old = split_tags(bare, self.separator)
        if not old:
            return line
        new = {"add": self._added, "remove": self._removed, "replace_tag": self._replaced}[self.action](old)
        return line if new == old else self._joined(new) + line[len(bare) :]

    def _added(self, old: list[str]) -> list[str]:
        there = set(map(self._key, old))
        fresh = [tag for tag in split_tags(self.put, self.separator) if self._key(tag) not in there]
        return [*old, *fresh] if self.at_end else [*fresh, *old]

    def _removed(self, old: list[str]) -> list[str]:
        gone = set(map(self._key, split_tags(self.find, self.separator)))
        return [tag for tag in old if self._key(tag) not in gone]

    def _replaced(self, old: list[str]) -> list[str]:
        """The new tags replace the first of the old ones; a tag that exists already is not duplicated."""
        gone = set(map(self._key, split_tags(self.find, self.separator)))
        if gone.isdisjoint(map(self._key, old)):
            return old
        new, there = [], {self._key(tag) for tag in old} - gone
        fresh = [tag for tag in split_tags(self.put, self.separator) if self._key(tag) not in there]
        for tag in old:
            if self._key(tag) in gone:
                new += fresh
                fresh = []
            else:
                new.append(tag)
        return new

    def _key(self, tag: str) -> str:
        return tag if self.match_case else tag.casefold()

    def _joined(self, tags: list[str]) -> str:
        gap = self.separator if self.separator.endswith(" ") else self.separator + " "
        return gap.join(tags)


def split_tags(text: str, separator: str = ",") -> list[str]:
    return [tag for part in text.split(separator or ",") if (tag := part.strip())]


def tag_key(tag: str) -> str:
    """The same for all spellings of a tag: upper and lower case, underscores and spaces."""
    return tag.strip().replace("_", " ").casefold()


def frequencies(captions: Iterable[str], separator: str = ",", prefix: str = "") -> list[tuple[str, int]]:
    """The number of captions with each tag, the most frequent first. Case is ignored."""
    counted: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for caption in captions:
        found = [tag for line in caption.splitlines() for tag in split_tags(line, separator)]
        counted.update({tag.casefold() for tag in found})
        for tag in found:
            shown.setdefault(tag.casefold(), tag)
    wanted = prefix.casefold()
    ranked = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(shown[key], count) for key, count in ranked if wanted in key]


def trigger(word: str) -> Callable[[str], bool]:
    """A test whether a caption has the trigger word, as a whole word; case is ignored."""
    pattern = re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
    return lambda caption: pattern.search(caption) is not None
