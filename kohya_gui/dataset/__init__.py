"""The tab that shows and changes the images and captions of a data set."""
