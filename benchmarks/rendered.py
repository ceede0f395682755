"""Text lines and pages drawn by Pillow, with fonts that matplotlib brings along: inputs for networks that read."""

from __future__ import annotations

import random
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono")
WORDS = (
    "time year people way day thing life child world school state family student group country problem hand part place "
    "case week company system program question work government number night point home water room mother area money "
    "story fact month right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team minute idea body information back parent "
    "face level office door health person art history party result change morning reason research girl moment air "
    "teacher"
).split()


def phrase(rng: random.Random, n_words: int) -> str:
    """Some words, a few of them numbers, in small letters, capitals or both."""
    words = [str(rng.randint(0, 9999)) if rng.random() < 0.1 else rng.choice(WORDS) for _ in range(n_words)]
    case = rng.choice((str.lower, str.title, str.upper, str.lower))
    return case(" ".join(words))


def font(rng: random.Random, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONTS / f"{rng.choice(FACES)}.ttf"), size)


def colours(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Light paper and dark ink."""
    return tuple(rng.randint(205, 255) for _ in range(3)), tuple(rng.randint(0, 80) for _ in range(3))


def cut_line(rng: random.Random, width: int = 192, height: int = 48, *, turned: bool = False) -> Image.Image:
    """One line of text as readers of texts hand it to their networks: cut out closely, scaled to the height of the
    input, and with grey, which becomes 0, where it does not fill the width. A ``turned`` line stands on its head.
    """
    paper, ink = colours(rng)
    ruler = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    while True:
        text, face = phrase(rng, rng.randint(1, 3)), font(rng, rng.randint(22, 34))
        left, top, right, bottom = ruler.textbbox((0, 0), text, font=face)
        beside, above = rng.randint(2, 5), rng.randint(2, 5)
        size = int(right - left) + 2 * beside, int(bottom - top) + 2 * above
        scaled = round(size[0] * height / size[1])
        if scaled <= width:
            break
    line = Image.new("RGB", size, paper)
    ImageDraw.Draw(line).text((beside - left, above - top), text, fill=ink, font=face)
    line = line.rotate(180) if turned else line
    image = Image.new("RGB", (width, height), (128, 128, 128))
    image.paste(line.resize((scaled, height), Image.Resampling.BILINEAR), (0, 0))
    return image


def page(rng: random.Random, width: int = 320, height: int = 320) -> Image.Image:
    """A page of lines in several sizes."""
    paper, ink = colours(rng)
    image = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(image)
    y = rng.randint(8, 24)
    while y < height - 40:
        face = font(rng, rng.randint(14, 30))
        text = phrase(rng, rng.randint(1, 4))
        while draw.textlength(text, font=face) > width - 30 and " " in text:
            text = text.rpartition(" ")[0]
        x = rng.randint(8, max(9, width - 20 - int(draw.textlength(text, font=face))))
        draw.text((x, y), text, fill=ink, font=face)
        y += int(face.size * rng.uniform(1.6, 2.6))
    return image


def document(rng: random.Random, width: int = 608, height: int = 800) -> Image.Image:
    """A page with a title, paragraphs and a figure with a caption."""
    image = Image.new("RGB", (width, height), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    y = rng.randint(30, 60)
    for part in ("title", *rng.sample(("text", "figure", "text", "text"), 4)):
        if part == "title":
            draw.text((rng.randint(50, 150), y), phrase(rng, 4).title(), fill=(0, 0, 0), font=font(rng, 26))
            y += 60
        elif part == "figure":
            left, right, low = rng.randint(60, 140), rng.randint(460, 540), y + rng.randint(110, 150)
            draw.rectangle((left, y, right, low), fill=(225, 232, 240), outline=(60, 60, 60))
            heights = [rng.randint(20, low - y - 10) for _ in range(6)]
            for index, top in enumerate(heights):
                x = left + 20 + index * (right - left - 40) // 6
                draw.rectangle((x, low - top, x + 30, low), fill=(70, 110, 170))
            draw.text(
                (left + 40, low + 8),
                f"Figure {rng.randint(1, 9)}: {phrase(rng, 4).lower()}",
                fill=(0, 0, 0),
                font=font(rng, 13),
            )
            y = low + 50
        else:
            face = font(rng, 14)
            for _ in range(rng.randint(4, 7)):
                text = phrase(rng, 14).lower()
                while draw.textlength(text, font=face) > 500:
                    text = text.rpartition(" ")[0]
                draw.text((55, y), text, fill=(20, 20, 20), font=face)
                y += 21
            y += 25
    return image


def inputs(images: list[Image.Image], mean: tuple[float, ...], std: tuple[float, ...], *, bgr: bool) -> Tensor:
    """Images as a batch of network inputs, (n, 3, h, w)."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 255
    pixels = pixels.flip(1) if bgr else pixels
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
