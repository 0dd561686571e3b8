"""What people do with stores: look (figures, one row made visible), and make new ones from old.

In come open stores; out come a description, a page and a picture of a row, what other couplings of
noise and tokens would keep, or another store: with another codec, with fewer rows, or gathered
from parts.
"""
