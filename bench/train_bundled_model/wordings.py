"""Wordings of the questions; a wording that stands twice is asked twice as often."""

WORDS = {
    "id": ("id", "id", "ID", "id number", "identifier"),
    "name": ("name", "name", "full name"),
    "age": ("age", "age", "age in years"),
    "occupation": ("occupation", "occupation", "job", "profession"),
    "country": ("country", "country", "country of residence", "home country"),
    "email": ("email", "email", "email address", "e-mail"),
    "phone": ("phone", "phone number", "telephone number", "number to call"),
    "address": ("address", "address", "street address", "postal address"),
    "city": ("city", "city", "town"),
    "department": ("department", "department", "division"),
    "salary": ("salary", "salary", "pay"),
    "code": ("code", "code", "access code"),
}
ANY = (
    "What is the {word} of {key}?",
    "What is the {word} of {key}?",
    "what is the {word} of {key}",
    "What's the {word} of {key}?",
    "Tell me the {word} of {key}.",
    "Give me the {word} of {key}.",
    "Please give me the {word} of {key}.",
    "Can you tell me the {word} of {key}?",
    "I need the {word} of {key}.",
    "Find the {word} of {key}.",
    "Look up the {word} of {key}.",
    "Which {word} does {key} have?",
    "What {word} is listed for {key}?",
    "The {word} of {key}?",
)
BY_NAME = (
    "What is {key}'s {word}?",
    "What is {key}'s {word}?",
    "Do you know {key}'s {word}?",
    "{key}'s {word}?",
    "{key}: {word}?",
    "For {key}, what is the {word}?",
)
OWN = {
    "age": ("How old is {key}?", "How many years old is {key}?"),
    "occupation": (
        "What does {key} do for a living?",
        "What does {key} do?",
        "What is {key}'s job?",
        "What does {key} work as?",
    ),
    "country": (
        "Where does {key} live?",
        "In which country does {key} live?",
        "Which country is {key} from?",
        "Where is {key} from?",
    ),
    "email": (
        "How can I email {key}?",
        "Where can I write an email to {key}?",
        "How do I reach {key} by email?",
    ),
    "phone": (
        "How can I call {key}?",
        "How do I reach {key} by phone?",
        "Which number do I call for {key}?",
    ),
    "address": (
        "What street does {key} live on?",
        "Where do I send a letter to {key}?",
        "Where should a parcel for {key} go?",
    ),
    "city": ("In which city does {key} live?", "Which city is {key} in?"),
    "department": (
        "In which department is {key}?",
        "Which department does {key} work in?",
        "Where does {key} work?",
    ),
    "salary": ("How much does {key} earn?", "What does {key} earn?"),
}
OWNER = (
    "Who has the email {key}?",
    "Whose email is {key}?",
    "Who uses the email address {key}?",
    "Which person has the email {key}?",
)
ID_KEYS = ("person {key}", "id {key}", "the person with id {key}", "number {key}")
ROW = (
    "Show the row of {key}.",
    "Show me the row of {key}.",
    "Give me everything about {key}.",
    "What do you know about {key}?",
    "Print the full row for {key}.",
    "Tell me all about {key}.",
    "What does the table say about {key}?",
)
ROWS = (
    "How many people are in the table?",
    "How many rows does the table have?",
    "How many people are listed?",
    "Count the people in the table.",
    "What is the number of people?",
)
EQUAL = {
    "country": (
        "How many people live in {key}?",
        "How many people are from {key}?",
        "Count the people from {key}.",
        "What is the number of people in {key}?",
        "How many are from {key}?",
        "How many people are in {key}?",
    ),
    "occupation": (
        "How many people work as {article} {key}?",
        "Count the people whose occupation is {key}.",
        "How many have the occupation {key}?",
        "How many people have the job {key}?",
        "How many people are {article} {key}?",
    ),
    "city": (
        "How many people live in the city of {key}?",
        "Count the people in {key}.",
        "How many are in the city {key}?",
    ),
    "department": (
        "How many people work in {key}?",
        "How many people are in the {key} department?",
        "Count the people in the department {key}.",
    ),
}
EQUAL_TITLES = {
    "country": "From {key}",
    "occupation": "Working as {key}",
    "city": "In the city {key}",
    "department": "In the department {key}",
}
OVER = (
    "How many people are older than {key}?",
    "How many people are over {key}?",
    "Count the people older than {key}.",
)
UNDER = (
    "How many people are younger than {key}?",
    "How many people are under {key}?",
    "Count the people younger than {key}.",
)
OLDER = (
    "Who is older, {a} or {b}?",
    "Which of {a} and {b} is older?",
    "Is {a} older than {b}?",
    "Compare the ages of {a} and {b}.",
)
YOUNGER = (
    "Who is younger, {a} or {b}?",
    "Which of {a} and {b} is younger?",
    "Is {a} younger than {b}?",
)
SAME_COUNTRY = (
    "Do {a} and {b} live in the same country?",
    "Are {a} and {b} from the same country?",
)
OLDEST = (
    "Who is the oldest person?",
    "Who is the oldest?",
    "Which person is the oldest?",
    "Who is the oldest person in the table?",
)
YOUNGEST = (
    "Who is the youngest person?",
    "Who is the youngest?",
    "Which person is the youngest?",
    "Who is the youngest person in the table?",
)
