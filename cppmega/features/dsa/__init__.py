"""DeepSeek sparse attention: kinds of layers, schedule of its loss, and what layers share."""
