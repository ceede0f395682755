"""One model or several over data: figures, certificate, size and latency."""
