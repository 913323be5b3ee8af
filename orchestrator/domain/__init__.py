"""The vocabulary of Everstep: plain values and pure functions, standard library only, importing nothing of ours."""
