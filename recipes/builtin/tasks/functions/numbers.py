"""Example functions about numbers."""

# ruff: noqa: SIM110
from .example import example


@example((1, 2), (7, -3), also="return the sum of two numbers")
def add(a, b):
    """Add two numbers."""
    return a + b


@example((5, 2), (7, -3), also="return the difference of two numbers")
def subtract(a, b):
    """Subtract one number from another."""
    return a - b


@example((3, 2), (7, -3), also="return the product of two numbers")
def multiply(a, b):
    """Multiply two numbers."""
    return a * b


@example((1, 2), (9, 4), also="find the larger of two numbers")
def larger(a, b):
    """Return the larger of two numbers."""
    return a if a > b else b


@example((1, 2), (9, 4), also="find the smaller of two numbers")
def smaller(a, b):
    """Return the smaller of two numbers."""
    return a if a < b else b


@example((4,), (7,), also="tell if a number is even")
def is_even(number):
    """Check whether a number is even."""
    return number % 2 == 0


@example((4,), (7,), also="tell if a number is odd")
def is_odd(number):
    """Check whether a number is odd."""
    return number % 2 == 1


@example((1,), (-7,), (0,), also="tell if a number is positive")
def is_positive(number):
    """Check whether a number is positive."""
    return number > 0


@example((1,), (7,), (9,), (2,), also="tell if a number is prime")
def is_prime(number):
    """Check whether a number is prime."""
    if number < 2:
        return False
    for i in range(2, int(number**0.5) + 1):
        if number % i == 0:
            return False
    return True


@example((5,), (0,), (1,), also="return the factorial of a number")
def factorial(n):
    """Compute the factorial of a number."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


@example((100,), (0,), also="turn degrees Celsius into Fahrenheit")
def celsius_to_fahrenheit(celsius):
    """Convert Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


@example((212,), (32,), also="turn degrees Fahrenheit into Celsius")
def fahrenheit_to_celsius(fahrenheit):
    """Convert Fahrenheit to Celsius."""
    return (fahrenheit - 32) * 5 / 9


@example((7,), (1,), also="list the first n Fibonacci numbers")
def fibonacci(n):
    """Return the first n Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


@example((2, 5), (3, 0), also="raise a number to a power")
def power(base, exponent):
    """Compute the power of a number."""
    return base**exponent


@example((3, 4), also="return the area of a rectangle")
def rectangle_area(width, height):
    """Compute the area of a rectangle."""
    return width * height


@example((3, 4), also="return the perimeter of a rectangle")
def perimeter(width, height):
    """Compute the perimeter of a rectangle."""
    return 2 * (width + height)


@example((-3,), (4,), also="return the absolute value of a number")
def absolute(number):
    """Compute the absolute value of a number."""
    if number < 0:
        return -number
    return number


@example((12, 18), (7, 5), also="return the greatest common divisor")
def gcd(a, b):
    """Find the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


@example((123,), (9,), also="return the digit sum of a number")
def digit_sum(number):
    """Sum the digits of a number."""
    return sum(int(digit) for digit in str(number))


@example((2000,), (1900,), (2024,), also="tell if a year is a leap year")
def is_leap_year(year):
    """Check whether a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@example(((0, 0), (3, 4)), also="return the squared distance of two points")
def squared_distance(p, q):
    """Compute the squared distance of two points."""
    return (p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2


@example((5, 1, 3), (0, 1, 3), (2, 1, 3), also="limit a number to a range")
def clamp(number, low, high):
    """Clamp a number between two limits."""
    if number < low:
        return low
    if number > high:
        return high
    return number
