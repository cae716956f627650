"""The study of `grace report`: tasks x methods x seeds x ranks in simulation, and what it found."""
