"""What a run shows and leaves behind: metrics, curves, the folder, and the progress display.

Importing these modules needs neither rich nor matplotlib; the functions that draw import them.
"""
