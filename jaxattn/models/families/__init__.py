"""Published models, one file per `model_type`: configuration, blocks, mapping of the tensors."""
