"""From a plan to a smaller network: compression, evaluation, and the archive."""

from tensigma.pipeline.compression import compress, compress_
from tensigma.pipeline.progress import CompressionProgress
from tensigma.pipeline.report import LayerReport, Report, Size

__all__ = ["CompressionProgress", "LayerReport", "Report", "Size", "compress", "compress_"]
