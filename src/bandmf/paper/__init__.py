"""Every figure, table and claim of the paper, computed again.

`strategies` needs no privacy accounting, `privacy` does, `training` measures time or trains.
"""
