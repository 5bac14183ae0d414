"""Models of single members: what a client or a leaf makes of the federation's model.

In:       a finished run, a member's own text.
Out:      the member's own model, chosen on text that it held out.
Promise:  the federation's model is always among those chosen from; what decides is never what is
          reported.
Not here: training the federation (`training`), personal layers of a tree (`federation`).
"""
