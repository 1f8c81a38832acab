"""How the page looks as a whole: its header, typeface, mark and colours."""
