"""The tab that shows and edits the images and captions of a data set."""
