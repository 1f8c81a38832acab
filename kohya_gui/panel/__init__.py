"""What runs, waits and ran: the panel beside the tabs, and the queue."""
