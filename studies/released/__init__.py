"""Error bars that released models come with."""
