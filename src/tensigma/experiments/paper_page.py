"""All results as one page of the documentation, figures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensigma.experiments.catalogue import printed_of
from tensigma.experiments.reproduction import current_cells, kind_of
from tensigma.experiments.results import Results
from tensigma.experiments.settings import Config
from tensigma.experiments.tables import markdown
from tensigma.files import whole_file
from tensigma.report.figure import draw

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
_SUBSTITUTE = """**All of them are substitutes**: the paper's checkpoints are not part of this project, so smaller
public networks take their place, as each section says. They are narrow where the paper's are wide, so rates and
accuracies are not comparable number by number; what can be compared is which way of compressing is ahead, and by how
much. The `paper` configs run the original settings for whoever has the checkpoints and data sets."""
_OWN = "Models and data are those of the paper."


def write_page(results: Sequence[Results], page: Path) -> None:
    """Write the page to ``page`` and figures into a folder of the same name beside it."""
    substitutes = any(each.config.substitute for each in results)
    parts = [_INTRODUCTION.format(count=len(results), origin=_SUBSTITUTE if substitutes else _OWN)]
    for each in results:
        config = each.config
        figure = None
        cells = current_cells(each)
        panels = kind_of(config).panels(config, cells) if config.shown == "figure" and cells else []
        if panels:
            figure = f"{page.stem}/{config.name}.svg"
            draw(panels, page.parent / figure, title=figure_title(config))
        parts.append(markdown(each, printed_of(config.name), figure=figure))
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(page) as partial:
        partial.write_text("\n".join(parts), encoding="utf-8")


def figure_title(config: Config) -> str:
    """What stands above a figure."""
    quick = ", quick form" if config.quick else ""
    return config.title + (quick if config.substitute is None else f" (substitute{quick})")
