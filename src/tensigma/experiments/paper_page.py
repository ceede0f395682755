"""All results as one page: of the documentation, figures beside it, or one HTML file with everything inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensigma.experiments.results import Results
from tensigma.experiments.sections import section_of
from tensigma.experiments.tables import markdown
from tensigma.files import whole_file
from tensigma.report import draw, write_results

_INTRODUCTION = """# The paper's tables and figures

{count} experiments, named after the labels in the paper's source. What was measured here stands first, the paper's own
numbers below it where it prints any.

{origin}

Top-1 accuracy is in per cent, without any retraining unless a column says so. Ranks follow the paper's rule (VBMF with
ratio α, truncated), layers are kernels larger than 1×1 except the first convolution (for AlexNet also Linear layers),
and the rate is original ÷ compressed parameters of the whole model. "Tucker2-ALS" and "CP-ALS" are the classical
decompositions under the Frobenius norm, solved by this library at TensorLy's error or below; Σ is the paper's norm,
centred Σ the default here.

Regenerate the results with `tensigma reproduce all --data DIR`, and this page with
`tensigma reproduce --table all --to docs/paper.md`. A run that was stopped goes on where it was.

## With the paper's own models and data

`tensigma reproduce NAME --config paper --data DIR` runs the original settings (`--device cuda` is advised). `DIR` holds

| path | what |
|---|---|
| `weights/resnet18.pth`, `resnet50.pth`, `googlenet.pth`, `alexnet.pth` | torchvision's ImageNet checkpoints |
| `weights/resnet18-cifar10.pth`, `…-cifar100.pth` and so on | the same for 10 or 100 classes, trained at 224×224 |
| `imagenet/train`, `imagenet/val` | one folder for each class |
| `cifar10`, `cifar100` | the binary versions, or `train.npz` and `test.npz` with `images` and `labels` |
| `aircraft/train`, `flowers102/train` | FGVC-Aircraft and Oxford Flowers-102, folders of images |

What lies elsewhere is named with `--weights resnet18=FILE` and `--source imagenet-val=imagefolder:DIR`; names are those
of the config files in `tensigma/experiments/configs/paper`.
"""
_SUBSTITUTE = """**All of them are substitutes**: the paper's checkpoints are not part of this project, so other
public networks take their place, as each section says. But for a ResNet-50 with other weights they are narrow where the
paper's are wide, so rates and accuracies are not comparable number by number; what can be compared is which way of
compressing is ahead, and by how much. The `paper` configs run the original settings, if you have the checkpoints and
data sets."""
_OWN = "Models and data are those of the paper."


def write_page(results: Sequence[Results], page: Path) -> None:
    """Write the page to ``page`` and figures into a folder of the same name beside it."""
    substitutes = any(each.config.substitute for each in results)
    parts = [_INTRODUCTION.format(count=len(results), origin=_SUBSTITUTE if substitutes else _OWN)]
    for section in map(section_of, results):
        figure = None
        if section.panels:
            figure = f"{page.stem}/{section.name}.svg"
            draw(section.panels, page.parent / figure, title=section.figure_title)
        parts.append(markdown(section, figure=figure))
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(page) as partial:
        partial.write_text("\n".join(parts), encoding="utf-8")


def write_html(results: Sequence[Results], page: Path) -> None:
    """Write one self-contained HTML page to ``page``; experiments without any result are only named."""
    sections = [section_of(each) for each in results]
    done = [section for section in sections if section.tables]
    missing = [section.name for section in sections if not section.tables]
    lead = f"{len(done)} experiment{'' if len(done) == 1 else 's'} with results, the paper's own numbers beside them."
    if any(section.substitute for section in done):
        lead += " Where it says **substitute**, smaller models stand in for the paper's."
    if missing:
        lead += f" Not run: {', '.join(missing)}."
    write_results(done, page, title="The paper's tables and figures", lead=lead)
