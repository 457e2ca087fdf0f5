"""One model on many ranks: layouts, their application to a model, and moving between them."""
