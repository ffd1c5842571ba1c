"""SGLang's own route: texts or token ids in, texts and token ids out."""
