"""What `bandmf train` and the examples train on: data sets, and one private run with its accuracy."""
