"""Answers as Plotly figures: plain data that the page embeds, and that `Run.figure` shows in a notebook. One module a picture.

A figure is `{"data": […], "layout": {…}}`, Plotly's own JSON: built without its Python objects, which take a second to import.
Colours of text and background are left to whoever shows it. Nothing here computes an answer.
"""
