"""The data of a training: images are found, captioned, sorted into buckets, encoded once, and put into batches."""

from library.data.finding import scan
from library.data.images import Image, ImageSet, summarise_images
from library.data.preflight import Check, check_data
