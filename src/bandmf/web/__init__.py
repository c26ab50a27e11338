"""A page to plan with: `bandmf web`. It shows what the library computes and decides nothing."""
