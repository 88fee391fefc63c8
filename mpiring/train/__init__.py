"""``mpirun -n 8 python -m mpiring.train``: train a network, gradients exchanged behind backward.

``options`` what can be asked for; ``loop`` the training itself; ``report`` what a
person or a program reads of it; ``__main__`` the beginning and all ways to end.
"""
