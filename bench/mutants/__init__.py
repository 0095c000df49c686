"""Small wrong changes in a training run, each planted alone, and whether `penstock.compare` names them."""
