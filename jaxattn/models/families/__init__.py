"""Published models, one file per `model_type`: configuration, blocks, places of the tensors."""
