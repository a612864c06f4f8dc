"""Answering with models that understand texts, images, videos and sounds."""
