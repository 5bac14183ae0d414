"""Where stations meet to make a round: a round is the published algorithm."""
