"""Evaluating models that understand texts, images, videos and sounds: benchmarks, scores, reports."""
