#!/usr/bin/env python3
"""Builds the corpus of tinylm from public-domain texts that Debian packages carry.

    apt-get install bible-kjv diatheke sword-text-web dict-devil
    python3 prepare_data.py --out data

Two packages (R data sets) are fetched with `apt-get download` and unpacked into a temporary folder,
so that R itself need not be installed. Writes to the output folder:

    train.txt           what train.py learns from
    heldout.txt         whole books and chapters that train.txt does not hold, in any translation
    heldout_sample.txt  the start of each held-out part, 64 KB in all: what the demo and tests use

Everything is folded to ASCII, one paragraph (or verse) a line, documents in reading order. README.md
lists package, text and licence.
"""

import argparse
import gzip
import os
import re
import subprocess
import tempfile
import unicodedata
import zlib

# In both translations, so that what is held out is not learnt from the other one.
HELD_OUT_BIBLE = {"Ruth", "Esther", "Jonah", "Galatians", "James"}
HELD_OUT_NOVEL = "persuasion"
HELD_OUT_NOVEL_CHAPTERS = 6  # its last ones

SAMPLE_BYTES = 64 * 1024

FOLD = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--",
        "\u2026": "...", "\u00a0": " ", "\ufeff": "", "\u00e6": "ae", "\u00c6": "AE", "\u0153": "oe",
    }
)

# As `bible` abbreviates them, in its order, and as diatheke (SWORD) names them.
KJV_BOOKS = (
    "Ge Exo Lev Num Deu Josh Jdgs Ruth 1Sm 2Sm 1Ki 2Ki 1Chr 2Chr Ezra Neh Est Job Psa Prv Eccl SSol "
    "Isa Jer Lam Eze Dan Hos Joel Amos Obad Jonah Mic Nahum Hab Zep Hag Zec Mal Mat Mark Luke John "
    "Acts Rom 1Cor 2Cor Gal Eph Phi Col 1Th 2Th 1Tim 2Tim Titus Phmn Heb Jas 1Pet 2Pet 1Jn 2Jn 3Jn "
    "Jude Rev"
).split()
BOOKS = (
    "Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,2 Samuel,1 Kings,"
    "2 Kings,1 Chronicles,2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalms,Proverbs,Ecclesiastes,"
    "Song of Solomon,Isaiah,Jeremiah,Lamentations,Ezekiel,Daniel,Hosea,Joel,Amos,Obadiah,Jonah,Micah,"
    "Nahum,Habakkuk,Zephaniah,Haggai,Zechariah,Malachi,Matthew,Mark,Luke,John,Acts,Romans,"
    "1 Corinthians,2 Corinthians,Galatians,Ephesians,Philippians,Colossians,1 Thessalonians,"
    "2 Thessalonians,1 Timothy,2 Timothy,Titus,Philemon,Hebrews,James,1 Peter,2 Peter,1 John,2 John,"
    "3 John,Jude,Revelation"
).split(",")


def to_ascii(text):
    text = unicodedata.normalize("NFKD", text.translate(FOLD))
    return text.encode("ascii", "ignore").decode("ascii")


def run(*command, cwd=None):
    done = subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.PIPE)
    return done.stdout.decode("utf-8")


def render_bible(verses):
    """[(book, chapter, verse text)] -> {book: text}, a heading a chapter, a verse a line."""
    books = {}
    last = None
    for book, chapter, text in verses:
        lines = books.setdefault(book, [])
        if last != (book, chapter):
            lines.append(f"\n{book} {chapter}\n")
            last = (book, chapter)
        lines.append(text)
    return {book: "\n".join(lines).strip() + "\n" for book, lines in books.items()}


def king_james():
    name = dict(zip(KJV_BOOKS, BOOKS))
    verses = []
    for line in run("bible", "-f", "gen1:1-rev22:21").splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        verses.append((name[match[1]], int(match[2]), match[3]))
    return render_bible(verses)


def world_english():
    verses = []
    for book in BOOKS:
        # SWORD spells the books with Roman numerals.
        sword = re.sub(r"^(\d) ", lambda m: "I" * int(m[1]) + " ", book)
        sword = sword.replace("Revelation", "Revelation of John")
        raw = run("diatheke", "-b", "engWEB2015eb", "-f", "plain", "-k", sword)
        head = re.compile(r"^ *" + re.escape(sword) + r" (\d+):(\d+): ?", re.MULTILINE)
        matches = list(head.finditer(raw))
        assert matches, f"no verses of {book}"
        for i, match in enumerate(matches):
            end = matches[i + 1].start() if i + 1 < len(matches) else raw.rindex("(engWEB2015eb)")
            text = raw[match.end():end]
            # A psalm's title stands, after a blank line, before each of its verses.
            text = text.split("\n\n")[0]
            text = " ".join(text.split())
            if text:
                verses.append((book, int(match[1]), to_ascii(text)))
    return render_bible(verses)


def unpack(packages, into):
    for package in packages:
        run("apt-get", "download", "-q", package, cwd=into)
    for name in os.listdir(into):
        if name.endswith(".deb"):
            run("dpkg-deb", "-x", os.path.join(into, name), into)


def r_strings(path):
    """Each character vector of an R lazy-load database, as a list of lines.

    The file is a row of (big-endian length, zlib stream) chunks; a chunk holds R's XDR serialisation
    (R Internals, "Serialization Formats"): a vector's flags end in byte 0x10, a string's in 0x09.
    """
    with open(path, "rb") as file:
        data = file.read()
    while data:
        stream = zlib.decompressobj()
        chunk = stream.decompress(data[4:])
        data = stream.unused_data
        at = 18 + int.from_bytes(chunk[14:18], "big")  # "X\n", three versions, the encoding
        assert chunk[at + 3] == 0x10, "not a character vector"
        count = int.from_bytes(chunk[at + 4:at + 8], "big")
        at += 8
        lines = []
        for _ in range(count):
            assert chunk[at + 3] == 0x09, "not a string"
            size = int.from_bytes(chunk[at + 4:at + 8], "big")
            lines += chunk[at + 8:at + 8 + size].decode("utf-8").split("\n")
            at += 8 + size
        yield lines


def unwrap(lines):
    """Joins the lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in lines))
    joined = (" ".join(to_ascii(p).split()) for p in paragraphs)
    return "\n".join(p for p in joined if p) + "\n"


def novels(root):
    library = os.path.join(root, "usr/lib/R/site-library")
    works = {}
    for lines in r_strings(os.path.join(library, "janeaustenr/data/Rdata.rdb")):
        works[lines[0].lower()] = unwrap(lines)
    (moby,) = r_strings(os.path.join(library, "tokenizers/data/Rdata.rdb"))
    begin = next(i for i, line in enumerate(moby) if line.startswith("*** START"))
    end = next(i for i, line in enumerate(moby) if line.startswith("*** END"))
    works["moby dick"] = unwrap(moby[begin + 1:end])
    return works


def devils_dictionary():
    with gzip.open("/usr/share/dictd/devil.dict.dz", "rb") as file:
        text = file.read().decode("utf-8", "replace")
    return unwrap(text[text.index("PREFACE"):].split("\n"))


def split_chapters(text, last):
    """(all but the last chapters, the last chapters)."""
    starts = [m.start() for m in re.finditer(r"^Chapter \d+$", text, re.MULTILINE | re.IGNORECASE)]
    at = starts[-last]
    return text[:at], text[at:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder the texts are written to")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        unpack(["r-cran-janeaustenr", "r-cran-tokenizers"], root)
        works = novels(root)
    king, world = king_james(), world_english()
    works[HELD_OUT_NOVEL], novel_end = split_chapters(works[HELD_OUT_NOVEL], HELD_OUT_NOVEL_CHAPTERS)

    train = [king[b] for b in BOOKS if b not in HELD_OUT_BIBLE]
    train += [world[b] for b in BOOKS if b not in HELD_OUT_BIBLE]
    train += [works[title] for title in sorted(works)]
    train.append(devils_dictionary())
    held_out = [king[b] for b in BOOKS if b in HELD_OUT_BIBLE]
    held_out += [world[b] for b in ("Jonah", "James")]
    held_out.append(novel_end)

    os.makedirs(args.out, exist_ok=True)
    share = SAMPLE_BYTES // len(held_out)
    texts = {
        "train.txt": "\n".join(train),
        "heldout.txt": "\n".join(held_out),
        "heldout_sample.txt": "".join(part[:share] for part in held_out),
    }
    for name, text in texts.items():
        with open(os.path.join(args.out, name), "w", encoding="ascii", newline="\n") as file:
            file.write(text)
        print(f"{name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
