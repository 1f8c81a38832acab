"""Captions as lists of tags: count them, and edit many at once. Pure functions of text."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from library.config.problems import ConfigError, require_choice

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
        require_choice("action", self.action, ACTIONS)
        if self.action == "add" and not split_tags(self.put, self.separator):
            raise ConfigError("tags to add: write at least one")
        if self.action != "add" and not self.find.strip(" " if self.action == "replace_text" else None):
            raise ConfigError(
                "{what} to find: write something", what="text" if self.action == "replace_text" else "tags"
            )

    def apply(self, caption: str) -> str:
        """Return a caption after the edit, line by line; lines without a change are preserved exactly."""
        if self.action == "replace_text":
            flags = 0 if self.match_case else re.IGNORECASE
            # A function, since a text would be read as a template: "\1" in it as a group.
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
        present = set(map(self._key, old))
        new_tags = [tag for tag in split_tags(self.put, self.separator) if self._key(tag) not in present]
        return [*old, *new_tags] if self.at_end else [*new_tags, *old]

    def _removed(self, old: list[str]) -> list[str]:
        gone = set(map(self._key, split_tags(self.find, self.separator)))
        return [tag for tag in old if self._key(tag) not in gone]

    def _replaced(self, old: list[str]) -> list[str]:
        """Put the new tags in place of the first of the old ones; a tag that exists already is not duplicated."""
        gone = set(map(self._key, split_tags(self.find, self.separator)))
        if gone.isdisjoint(map(self._key, old)):
            return old
        new, present = [], {self._key(tag) for tag in old} - gone
        new_tags = [tag for tag in split_tags(self.put, self.separator) if self._key(tag) not in present]
        for tag in old:
            if self._key(tag) in gone:
                new += new_tags
                new_tags = []
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
    # Taggers write underscores where people write spaces.
    return tag.strip().replace("_", " ").casefold()


def frequencies(captions: Iterable[str], separator: str = ",", prefix: str = "") -> list[tuple[str, int]]:
    """Count the captions with each tag, the most frequent first. Case is ignored; the first spelling is returned."""
    counted: Counter[str] = Counter()
    spellings: dict[str, str] = {}
    for caption in captions:
        tags = [tag for line in caption.splitlines() for tag in split_tags(line, separator)]
        counted.update({tag.casefold() for tag in tags})
        for tag in tags:
            spellings.setdefault(tag.casefold(), tag)
    search_text = prefix.casefold()
    ranked = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(spellings[key], count) for key, count in ranked if search_text in key]


def trigger(word: str) -> Callable[[str], bool]:
    # \b would fail at a trigger word that begins or ends with a sign, such as <cat>.
    pattern = re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
    return lambda caption: pattern.search(caption) is not None
