"""One pass of the losses in which layers note what the gradients of single examples are made of."""
