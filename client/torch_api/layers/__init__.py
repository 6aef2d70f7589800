"""Parts of models that communicate: collectives that gradients flow through, synchronised BatchNorm, experts."""
