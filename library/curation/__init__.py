"""Looking after a folder of images: what is in it, its captions, its doubles, and changes that can be taken back.

No torch. Nothing here can destroy an original: what changes or goes is first kept in `.trash/<date>/` inside the folder
(`trash.py`), and taking a change back leaves alone what was altered since.
"""
