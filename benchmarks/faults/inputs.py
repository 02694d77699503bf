"""Hostile files by a seed, each with the command that a user would give it to.

`tests.corpus` damages good files; these are made to be bad: bombs, endless nesting, strange but
legal modes, pickles, paths that lead out of the folder.
"""

import gzip
import io
import json
import struct
import tarfile
import warnings
import zipfile
import zlib

import numpy as np

NUMBERS = "0 -1 1e999 nan -inf 1_000 0x1F ٣ ½ 1,5 1.5.2 --3 +4 1e-400 9" + "9" * 400
NUMBERS = [*NUMBERS.split(), "", " ", "1" * 5000]
WORDS = [
    "",
    "\0",
    "é",
    "\u202e",
    "😀",
    '"',
    "'",
    "\\",
    ";",
    "=1+1",
    "\x1b[2J",
    "a" * 10**6,
    "#",
    "\ufeff",
]
DEEP = 10**5
HUGE = 10**11  # elements that a header promises


def array_file(dtype="<f4", shape=(60, 4), content=None, fortran=False, version=(1, 0), head=None):
    """Return an .npy file with any header."""
    text = head or f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"
    text = text.encode() + b"\n"
    size = struct.pack(
        "<H" if version == (1, 0) else "<I", len(text) & (0xFFFF if version == (1, 0) else -1)
    )
    content = np.zeros(240, "<f4").tobytes() if content is None else content
    return b"\x93NUMPY" + bytes(version) + size + text + content


def png(width, height, depth, colour, rows=b"", chunks=(), interlaced=0):
    """Return a PNG of these sizes; `rows` may be anything."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))]
    parts += [*chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


def make_toml(draw, place, options):
    """Options in a file."""
    name = draw.choice(options)
    value = draw.choice(
        [
            "[" * DEEP,
            "[" * 300 + "]" * 300,
            "{a=" * DEEP,
            "9" * 5000,
            "0x" + "f" * 5000,
            "1979-05-27T07:32:00Z",
            "07:32:00",
            '"\\ud800"',
            '"\\u0000"',
            '"' + "a" * 10**7 + '"',
            "[1, 'a', {b = 2}]",
            "inf",
            "-nan",
            "true",
            "[" + "1," * 10**5 + "]",
            "'''\n\n'''",
            '"../../escaped"',
            '"/dev/stdin"',
            '"/proc/self/mem"',
            '"os:system"',
            "1e308",
            "-0",
            "{}",
            "[[]]",
        ]
    )
    text = draw.choice(
        [
            f"{name} = {value}",
            f"{name} = {value}",
            f"{name} = {value}",
            f"{name} = 1\n{name} = 2",
            f"[{name}]\nx = {value[:500]}",
            f"[[{name}]]\n[[{name}]]",
            ".".join("a" * DEEP) + " = 1",
            f"{name}.{name} = 1",
            f'"{name}" = 1\r{name} = 2',
            f"[{'a.' * 5000}a]",
            "\n".join(f"k{i} = 1" for i in range(10**5)),
        ]
    )
    encoding = draw.choice(["utf-8"] * 5 + ["utf-16", "latin-1", "utf-8-sig"])
    file = place / "options.toml"
    file.write_bytes(text.encode(encoding, "replace"))
    return ["train", "--dataset", "iris", "--model", "mlp", "--max-steps", "1", "--config", file]


def make_table(draw, place, options):
    """A table."""
    columns = draw.choice([1, 2, 3, 3, 3, 3, 40, 5000])
    rows = [
        [
            draw.choice([*NUMBERS, "x", "y", "1", "2"] if draw.random() < 0.1 else ["1", "2", "3"])
            for _ in range(columns - 1)
        ]
        + [draw.choice("xyz")]
        for _ in range(draw.choice([0, 1, 2, 30, 30, 30]) if columns < 5000 else 10)
    ]
    names = [
        draw.choice([f"c{i}", f"c{i}", "c0", *WORDS]) if draw.random() < 0.2 else f"c{i}"
        for i in range(columns)
    ]
    mark = draw.choice([",", ",", ",", ";", "\t", "|", ", "])
    text = draw.choice(["\n", "\n", "\r\n", "\r"]).join(mark.join(row) for row in [names, *rows])
    how = draw.randrange(12)
    if how == 0:
        text = text.replace("1", '"1', 1)  # a quote that nothing closes
    elif how == 1:
        text += "\n" + "," * 10**6
    elif how == 2:
        text += "\n" + '"' + "a\n" * 10**5
    elif how == 3:
        text = '"' * 10**6 + text
    elif how == 4:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(WORDS) + text[at:]
    elif how == 5:
        text += "\n" + "\n".join(f"{i},{i},{i}" for i in range(10**5))  # 100,000 classes
    content = text.encode(draw.choice(["utf-8"] * 6 + ["utf-16", "latin-1", "utf-32"]), "replace")
    file = place / "a.csv"
    if how == 6:
        content, file = gzip.compress(b"a,b,c\n" + b"1,2,x\n" * 3 * 10**7, 1), place / "a.csv.gz"
    file.write_bytes(content)
    if draw.random() < 0.3:
        return ["predict", place / "iris", file]
    return ["train", "--dataset", file, "--model", "mlp", "--max-steps", "1"]


def make_npz(draw, place, options):
    """An archive of arrays."""
    bad = draw.choice(
        [
            lambda: array_file("|O", (3,), b"\x80\x04cos\nsystem\n(S'touch escaped'\ntR."),
            lambda: array_file("<f4", (HUGE,)),
            lambda: array_file("<f4", (2**40, 2**40)),
            lambda: array_file("<f4", (-1, 4)),
            lambda: array_file("<f4", (0, 4)),
            lambda: array_file("<f4", ()),
            lambda: array_file([("a", "<f4"), ("b", "<i8")], (20,)),
            lambda: array_file("<c8", (60, 2)),
            lambda: array_file("<U4", (60,), "abcd".encode("utf-32-le") * 60),
            lambda: array_file("<U4", (60,), b"\xff" * 960),
            lambda: array_file("<M8[ns]", (60, 2)),
            lambda: array_file("|V16", (60,)),
            lambda: array_file("<f2", (60, 8)),
            lambda: array_file(">f4", (60, 4)),
            lambda: array_file("<f16", (60, 1)),
            lambda: array_file(fortran=True),
            lambda: array_file("|b1", (60, 16)),
            lambda: array_file("<u8", (60, 2), b"\xff" * 960),
            lambda: array_file("<f4", (60, 4), np.full(240, np.nan, "<f4").tobytes()),
            lambda: array_file("<f4", (60, 4), np.full(240, 3e38, "<f4").tobytes()),
            lambda: array_file("<f4", (1,) * 64),
            lambda: array_file("<f4", (60, 4), b""),
            lambda: array_file(head="(" * 5000),
            lambda: array_file(
                head="{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"
            ),
            lambda: array_file(head="__import__('os').system('touch escaped')"),
            lambda: array_file(head=" " * 10**7, version=(2, 0)),
            lambda: b"\x93NUMPY\x09\x09" + bytes(99),
            lambda: b"",
            lambda: bytes(2**29),
        ]
    )()
    x, y = array_file(), array_file("<i8", (60,), (np.arange(60) % 3).tobytes())
    members = [("x.npy", x), ("y.npy", y)]
    how = draw.randrange(8)
    if how < 5:
        at = draw.randrange(2)
        members[at] = (members[at][0], bad)
    elif how == 5:
        members.append(
            (
                draw.choice(
                    ["../escaped", "/tmp/escaped", "x.npy", "a" * 60000, "\u202e", "x_train.npy"]
                ),
                x,
            )
        )
    elif how == 6:
        members += [(f"m{i}.npy", x) for i in range(20000)]
    file, sink = place / "a.npz", io.BytesIO()
    warnings.simplefilter("ignore")  # of names that stand twice
    with zipfile.ZipFile(
        sink,
        "w",
        draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
        if len(bad) < 2**25
        else zipfile.ZIP_DEFLATED,
    ) as archive:
        for name, content in members:
            archive.writestr(name, content)
    content = bytearray(sink.getvalue())
    if how == 7:
        at = content.find(b"PK\x01\x02") + draw.randrange(46)
        content[at] = draw.randrange(256)  # in the central directory
    file.write_bytes(content)
    return ["train", "--dataset", file, "--model", "mlp", "--max-steps", "1"]


def make_image(draw, place, options):
    """A picture, or a folder of classes with a bad one."""
    from PIL import Image

    size = draw.choice([(1, 1), (8, 8), (8, 8), (8, 8), (5, 400), (3000, 3000)])
    mode = draw.choice(
        ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F"]
    )
    form = draw.choice(
        ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "ICO", "TGA", "JPEG2000"]
    )
    sink = io.BytesIO()
    try:
        Image.new(mode, size).save(sink, form)
    except Exception:
        form = "PNG"
        Image.new("RGB", size).save(sink, form)
    content = draw.choice(
        [
            lambda: sink.getvalue(),
            lambda: sink.getvalue(),
            lambda: sink.getvalue()[: draw.randrange(len(sink.getvalue()))],
            lambda: png(2**31 - 1, 2**31 - 1, 8, 2),
            lambda: png(60000, 60000, 8, 2, bytes(10**6)),
            lambda: png(12000, 12000, 8, 2, bytes(12000 * 36001)),
            lambda: png(0, 8, 8, 2),
            lambda: png(8, 8, 3, 7),
            lambda: png(8, 8, 8, 3, bytes(72)),  # a palette that is not there
            lambda: png(8, 8, 16, 6, bytes(8 * 65), interlaced=1),
            lambda: png(8, 8, 8, 2, bytes(200), [(b"tEXt", b"a\0" + b"b" * 2**24)]),
            lambda: png(
                8, 8, 8, 2, bytes(200), [(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**29)))]
            ),
            lambda: png(
                8, 8, 8, 2, bytes(200), [(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**29)))]
            ),
            lambda: png(8, 8, 8, 2, b"\7" * 200),
            lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(escaped) (w) file\n",
            lambda: b"GIF89a" + b"\xff" * 99,
            lambda: b"P5 99999999999 1 255\n",
            lambda: b"P3 8 8 255 " + b"9 " * 3,
            lambda: b"BM" + b"\xff" * 60,
        ]
    )()
    folder = place / "images"
    for kind in "ab":
        (folder / kind).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (99 * i % 256, 0, 0)).save(folder / kind / f"{i}.png")
    name = draw.choice(["0.png", "0.png", "z.png", "z.jpg", "z.tif", "z.gif"])
    (folder / "a" / name).write_bytes(content)
    if draw.random() < 0.4:
        return ["predict", place / "digits", folder / "a" / name]
    return ["train", "--dataset", folder, "--model", "mlp", "--max-steps", "1"]


def make_tokenizer(draw, place, options):
    """A tokenizer.json."""
    vocab = {chr(97 + i): i for i in range(26)} | {" ": 26, "<unk>": 27, "</s>": 28, "\n": 29}
    value = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
    }
    nest = {"type": "Lowercase"}
    for _ in range(draw.choice([10, 200, 5000])):
        nest = {"type": "Sequence", "normalizers": [nest]}
    evil = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    split = {
        "type": "Split",
        "pattern": {"Regex": "(\\w*)*#"},
        "behavior": "Isolated",
        "invert": False,
    }
    grow = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "aaaaaaaa" * 2000}
    grows = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 8,
    }
    token = {
        "id": 2**31,
        "content": "q",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    at, item = draw.choice(
        [
            ("normalizer", nest),
            ("normalizer", evil),
            ("normalizer", grow),
            ("normalizer", grows),
            ("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            ("normalizer", {"type": "Prepend", "prepend": "a" * 10**7}),
            ("pre_tokenizer", split),
            (
                "pre_tokenizer",
                {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": True},
            ),
            ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
            ("added_tokens", [token]),
            ("added_tokens", [{**token, "id": -1}]),
            ("added_tokens", [{**token, "id": 28, "content": ""}]),
            ("added_tokens", [{**token, "id": 30 + i, "content": f"t{i}"} for i in range(10**4)]),
            ("model", {**value["model"], "vocab": {**vocab, "zz": 2**32 - 1}}),
            ("model", {**value["model"], "vocab": {**vocab, "zz": 5}}),
            ("model", {**value["model"], "vocab": {}}),
            ("model", {**value["model"], "merges": [["a", "b"]]}),
            ("model", {**value["model"], "merges": "x" * 10**6}),
            ("model", {**value["model"], "unk_token": "none"}),
            ("model", {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}),
            (
                "model",
                {
                    "type": "WordPiece",
                    "vocab": vocab,
                    "unk_token": "<unk>",
                    "continuing_subword_prefix": "",
                    "max_input_chars_per_word": 0,
                },
            ),
            (
                "model",
                {"type": "Unigram", "vocab": [["a", float(-i)] for i in range(30)], "unk_id": 99},
            ),
            ("model", {"type": "Unigram", "vocab": [["", 0.0], ["a", -1.0]], "unk_id": 0}),
            ("model", {**value["model"], "dropout": 1.0}),
            (
                "post_processor",
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                },
            ),
            (
                "decoder",
                {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b" * 10**6},
            ),
            (
                "truncation",
                {"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Right"},
            ),
            (
                "padding",
                {
                    "strategy": {"Fixed": 2**40},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "x",
                },
            ),
        ]
    )
    folder = place / "tokenizer"
    folder.mkdir()
    text = (
        json.dumps({**value, at: item})
        if at != "normalizer" or item is not nest
        else deep_json(value, nest)
    )
    (folder / "tokenizer.json").write_text(text)
    if draw.random() < 0.5:
        config = {
            "eos_token": draw.choice(["</s>", "q", "", None, 5, {"content": "</s>"}, "zz", [[]]])
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = draw.choice(
        ["the quick brown fox\n" * 100, "a" * 40 + "!\n" + "the fox\n" * 99, "é\0\n" * 200]
    )
    (place / "a.txt").write_text(text)
    return [
        "train",
        "--dataset",
        place / "a.txt",
        "--tokenizer",
        folder,
        "--model",
        "gpt",
        "--features",
        "8",
        "--heads",
        "2",
        "--layers",
        "1",
        "--context",
        "8",
        "--max-steps",
        "1",
    ]


def deep_json(value, nest):
    """Return JSON whose normalizer is nested more deeply than Python's writer goes."""
    depth = 0
    while nest["type"] == "Sequence":
        nest, depth = nest["normalizers"][0], depth + 1
    head = '{"type": "Sequence", "normalizers": [' * depth + json.dumps(nest) + "]}" * depth
    return json.dumps(value).replace('"normalizer": null', f'"normalizer": {head}')


def make_weights(draw, place, options):
    """A safetensors file, or another format with its name."""
    good = (place / "iris" / "torch.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    header, body = json.loads(good[8 : 8 + size]), good[8 + size :]
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    change = draw.choice(
        [
            {"shape": [HUGE]},
            {"shape": [0]},
            {"shape": [2**63, 2**63]},
            {"shape": [-1]},
            {"dtype": "F64"},
            {"dtype": "BF16"},
            {"dtype": "F8_E4M3"},
            {"dtype": "OBJ"},
            {"data_offsets": [0, 2**60]},
            {"data_offsets": [8, 0]},
            {"data_offsets": [0, 0], "shape": [0]},
        ]
    )
    header[name] = {**entry, **change}
    how = draw.randrange(6)
    if how == 0:
        header["../escaped"] = header.pop(name)
    text = json.dumps(header).encode() if how else b"[" * DEEP
    if how == 1:
        text = text[:-1] + b', "x": ' + b"[" * DEEP
    length = len(text) if how != 2 else draw.choice([0, 2**63, 2**64 - 1, 10**8, len(text) - 1])
    content = length.to_bytes(8, "little") + text + body
    if how == 3:
        content = b"\x80\x04cos\nsystem\n(S'touch escaped'\ntR."
    if how == 4:
        content = struct.pack("<Q", 99_000_000) + b" " * 99_000_000
    if how == 5:
        values = np.frombuffer(body, "<f4").copy()
        values[draw.randrange(len(values))] = draw.choice([np.nan, np.inf, 3e38])
        content = good[: 8 + size] + values.tobytes()
    file = place / draw.choice(["w.safetensors", "w.safetensors", "w.pt", "w.bin", "w.npz", "w"])
    file.write_bytes(content)
    return ["evaluate", place / "iris", "--weights", file]


def make_archive(draw, place, options):
    """CIFAR-10's archive with members that lead elsewhere, or grow."""
    folder = place / "cifar"
    folder.mkdir(exist_ok=True)
    sink = io.BytesIO()
    record = bytes(3073)
    with tarfile.open(
        fileobj=sink, mode="w:gz", format=draw.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    ) as tar:
        for name in ("data_batch_1.bin", "test_batch.bin"):
            item = tarfile.TarInfo(
                draw.choice(["cifar-10-batches-bin/", "cifar-10-batches-bin/", "", "../", "/tmp/"])
                + name
            )
            content = record * draw.choice([1, 3, 20])
            item.type = draw.choice(
                [tarfile.REGTYPE] * 5
                + [
                    tarfile.SYMTYPE,
                    tarfile.LNKTYPE,
                    tarfile.CHRTYPE,
                    tarfile.FIFOTYPE,
                    tarfile.DIRTYPE,
                ]
            )
            item.linkname = draw.choice(["/etc/passwd", "/dev/zero", name, "../escaped"])
            if draw.random() < 0.1:
                content = bytes(3073 * 150_000)
            if item.type == tarfile.REGTYPE:
                item.size = len(content)
            tar.addfile(item, io.BytesIO(content))
        if draw.random() < 0.2:
            for i in range(20000):
                tar.addfile(tarfile.TarInfo(f"m{i}"))
    content = sink.getvalue()
    if draw.random() < 0.3:
        content = content[: draw.randrange(len(content))]
    (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    return [
        "train",
        "--dataset",
        "cifar10",
        "--data-dir",
        folder,
        "--model",
        "mlp",
        "--max-steps",
        "1",
    ]


KINDS = {
    "options (TOML)": make_toml,
    "tables": make_table,
    "arrays (npz)": make_npz,
    "images": make_image,
    "tokenizers": make_tokenizer,
    "weights (safetensors)": make_weights,
    "archives (tar)": make_archive,
}
